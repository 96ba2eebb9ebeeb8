"""The command line: one module a verb.

In: arguments and CACHESVC_* variables. Out: tables or JSON on stdout, notes and errors on stderr, and exit codes. It
owns the text that people read, and no behaviour of the daemon.
"""

from __future__ import annotations

from importlib import import_module

import click

from cachesvc.cli import options
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
        (10, "no daemon answers; --cluster: a member does not"),
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


TASKS: dict[str, dict[str, str]] = {
    "Run a daemon": {
        "serve": "serve:serve",
        "run": "run:run",
        "config": "config:config",
        "reload": "datasets:reload",
        "bypass": "datasets:bypass",
        "stop": "stop:stop",
        "drain": "drain:drain",
        "doctor": "doctor:doctor",
    },
    "Look at it": {
        "status": "status:status",
        "top": "top.command:top",
        "why": "why:why",
        "events": "events:events",
        "nodes": "nodes:nodes",
        "where": "where:where",
    },
    "Keep data": {
        "prefetch": "prefetch:prefetch",
        "prefetches": "prefetches:prefetches",
        "cancel": "prefetches:cancel",
        "prepare": "prepare:prepare",
        "ls": "datasets:list_datasets",
        "pin": "datasets:pin",
        "unpin": "datasets:unpin",
        "evict": "datasets:evict",
        "verify": "verify:verify",
    },
    "Read and write data": {
        "find": "find:find",
        "order": "order:order",
        "cat": "copy:cat",
        "cp": "copy:cp",
        "env": "credentials:env",
        "index": "index:index",
        "tokenize": "tokenize:tokenize",
    },
    "Plan": {"try": "trial:trial", "estimate": "estimate:estimate", "simulate": "simulate:simulate"},
    "Help": {"help": "help:show_help"},
}
"""The verbs by task, in the order of the help, and the function of each. A verb's module is imported when it is run."""
_HIDDEN = {"credentials": "credentials:credentials"}
"""Profiles run it, and people do not."""
_PLACES = {verb: place for verbs in (*TASKS.values(), _HIDDEN) for verb, place in verbs.items()}
_WITHOUT_LOUDNESS = frozenset({"serve", "run", "config", *_HIDDEN})


class Verbs(click.Group):
    """A group whose help lists its verbs by task, and which imports a verb when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all verbs."""
        return sorted(_PLACES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a verb; None for an unknown one."""
        if cmd_name in _PLACES and cmd_name not in self.commands:
            module, _, function = _PLACES[cmd_name].partition(":")
            verb: click.Command = getattr(import_module(f"cachesvc.cli.{module}"), function)
            verb.params += () if cmd_name in _WITHOUT_LOUDNESS else options.loudness
            self.add_command(verb)
        return super().get_command(ctx, cmd_name)

    def all_commands(self) -> dict[str, click.Command]:
        """Return all verbs by name."""
        with click.Context(self) as context:
            return {name: found for name in _PLACES if (found := self.get_command(context, name))}

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the verbs with their first lines."""
        width = max(len(verb) for verbs in TASKS.values() for verb in verbs)
        limit = formatter.width - width - 6
        commands = self.all_commands()
        for task, verbs in TASKS.items():
            rows = [(f"{verb:<{width}}", commands[verb].get_short_help_str(limit)) for verb in verbs]
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
