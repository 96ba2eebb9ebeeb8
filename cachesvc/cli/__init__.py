"""The command line: one module a verb.

In: arguments and CACHESVC_* variables. Out: tables or JSON on stdout, notes and errors on stderr, and exit codes. It
owns the text that people read, and no behaviour of the daemon.
"""

from __future__ import annotations

import click

from cachesvc.cli import (
    bypass,
    config,
    copy,
    credentials,
    datasets,
    doctor,
    estimate,
    events,
    find,
    index,
    nodes,
    options,
    order,
    output,
    prefetch,
    prepare,
    reload,
    run,
    serve,
    simulate,
    status,
    stop,
    tokenize,
    trial,
    verify,
    where,
    why,
)
from cachesvc.cli.top import command as top
from cachesvc.core.errors import INTERRUPTED

EXIT_CODES = "\b\nExit codes:\n" + "\n".join(
    f"  {code:>3}  {meaning}"
    for code, meaning in [
        (0, "done, and all of it"),
        (1, "another failure; doctor: a check failed; evict: some of it stayed"),
        (2, "invalid argument, URI, format or budget"),
        (3, "not allowed: allowlist, socket or credentials"),
        (4, "not found, or empty"),
        (5, "corrupt data"),
        (6, "the source changed"),
        (7, "the source is unavailable"),
        (8, "out of space: it does not fit"),
        (9, "a cache directory fails"),
        (10, "no daemon answers"),
        (11, "deadline exceeded"),
        (12, "state mismatch"),
        (13, "another rank failed"),
        (14, "the daemon is busy with calls of this user"),
        (15, "not ready: a daemon may start later"),
        (INTERRUPTED, "interrupted"),
    ]
)
"""The epilog of `cachesvc --help`; a test compares it with core/errors.py. `cachesvc run` exits with its command's code
(128 + n when signal n ended it)."""


class Verbs(click.Group):
    """A group whose help lists its verbs by task."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the verbs with their first lines."""
        width = max(len(verb.name or "") for verbs in TASKS.values() for verb in verbs)
        limit = formatter.width - width - 6
        for task, verbs in TASKS.items():
            rows = [(f"{verb.name:<{width}}", verb.get_short_help_str(limit)) for verb in verbs]
            with formatter.section(task):
                formatter.write_dl(rows)


@click.group(
    cls=Verbs,
    epilog=EXIT_CODES,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(package_name="cachesvc", prog_name="cachesvc")
def cli() -> None:
    """The data service for training clusters: a cache daemon on every node, filled before the job starts.

    Start a daemon with `cachesvc serve`, fill it with `cachesvc prefetch URI`, read through it with
    `from cachesvc.torch import DataLoader, open_dataset`.
    """


@cli.command("help")
@click.argument("verb", required=False)
@click.option("--json", is_flag=True, help="Print JSON, one object a line.")
@click.pass_context
def show_help(context: click.Context, verb: str | None, json: bool) -> None:
    """Show the help of a verb, or this page."""
    root = context.find_root()
    found = cli if verb is None else cli.get_command(root, verb)
    if found is None:
        raise click.UsageError(f"No such command {verb!r}.", root)
    inner = root if verb is None else click.Context(found, info_name=verb, parent=root)
    text = found.get_help(inner)
    output.report(json, text, {"event": "help", "text": text})


TASKS = {
    "Run a daemon": (
        serve.serve,
        run.run,
        config.config,
        reload.reload,
        bypass.bypass,
        stop.stop,
        doctor.doctor,
    ),
    "Look at it": (status.status, top.top, why.why, events.events, nodes.nodes, where.where),
    "Keep data": (
        prefetch.prefetch,
        prepare.prepare,
        datasets.list_datasets,
        datasets.pin,
        datasets.unpin,
        datasets.evict,
        verify.verify,
    ),
    "Read and write data": (
        find.find,
        order.order,
        copy.cat,
        copy.cp,
        credentials.env,
        index.index,
        tokenize.tokenize,
    ),
    "Plan": (trial.trial, estimate.estimate, simulate.simulate),
    "Help": (show_help,),
}
"""The verbs by task, in the order of the help."""
_LOGS_ITSELF = (serve.serve, run.run, config.config)
for _verbs in TASKS.values():
    for _verb in _verbs:
        cli.add_command(_verb)
        _verb.params += () if _verb in _LOGS_ITSELF else options.loudness
cli.add_command(credentials.credentials)  # profiles run it, and people do not
