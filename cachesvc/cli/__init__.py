"""The command line: one module a verb.

In: arguments and CACHESVC_* variables. Out: tables or JSON on stdout, notes and errors on stderr, and the exit codes of
`exit_codes.py`. It owns the text that people read, and no behaviour of the daemon.
"""

from __future__ import annotations

import click

from cachesvc.cli import (
    datasets,
    doctor,
    estimate,
    exit_codes,
    find,
    index,
    nodes,
    prefetch,
    run,
    serve,
    simulate,
    status,
    tokenize,
    verify,
)


@click.group(
    epilog=exit_codes.HELP, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}
)
@click.version_option(package_name="cachesvc", prog_name="cachesvc")
def cli() -> None:
    """The data service for training clusters: a cache daemon on every node, filled before the job starts.

    Start a daemon with `cachesvc serve`, fill it with `cachesvc prefetch URI`, read through it with
    `from cachesvc.torch import DataLoader, open_dataset`.
    """


for _verb in (
    serve.serve,
    prefetch.prefetch,
    status.status,
    nodes.nodes,
    datasets.list_datasets,
    index.index,
    tokenize.tokenize,
    find.find,
    datasets.pin,
    datasets.unpin,
    datasets.evict,
    verify.verify,
    estimate.estimate,
    simulate.simulate,
    run.run,
    doctor.doctor,
):
    cli.add_command(_verb)
