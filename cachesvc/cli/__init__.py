"""The command line: one module a verb.

In: arguments and CACHESVC_* variables. Out: tables or JSON on stdout, notes and errors on stderr, and exit codes. It
owns the text that people read, and no behaviour of the daemon.
"""

from __future__ import annotations

import click

from cachesvc.cli import (
    config,
    copy,
    datasets,
    doctor,
    estimate,
    events,
    find,
    index,
    nodes,
    order,
    prefetch,
    reload,
    run,
    serve,
    simulate,
    status,
    tokenize,
    verify,
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


@click.group(
    epilog=EXIT_CODES, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}
)
@click.version_option(package_name="cachesvc", prog_name="cachesvc")
def cli() -> None:
    """The data service for training clusters: a cache daemon on every node, filled before the job starts.

    Start a daemon with `cachesvc serve`, fill it with `cachesvc prefetch URI`, read through it with
    `from cachesvc.torch import DataLoader, open_dataset`.
    """


for _verb in (
    serve.serve,
    config.config,
    reload.reload,
    prefetch.prefetch,
    status.status,
    top.top,
    nodes.nodes,
    events.events,
    datasets.list_datasets,
    index.index,
    tokenize.tokenize,
    find.find,
    order.order,
    datasets.pin,
    datasets.unpin,
    datasets.evict,
    verify.verify,
    copy.cat,
    copy.cp,
    estimate.estimate,
    simulate.simulate,
    run.run,
    doctor.doctor,
):
    cli.add_command(_verb)
