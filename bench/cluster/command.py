"""Command line of `python -m bench cluster`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import click
from rich.console import Console

from bench.cluster import rows
from testbed.cluster import alone, by_file, by_list
from testbed.servers import SeaweedFS

FULL_EXTENTS, QUICK_EXTENTS = 5_040, 240
"""Extents of D; both are multiples of the numbers of nodes."""
MEMBERS = {"file": by_file, "static": by_list, "alone": alone}


@click.command("cluster")
@click.option(
    "--quick", is_flag=True, help="Try whether everything runs: small data. The figures mean nothing."
)
@click.option("--markdown", is_flag=True, help="Print the table as docs/measured.md has it.")
@click.option(
    "--members",
    type=click.Choice(list(MEMBERS)),
    default="file",
    help="How nodes know each other: --cluster file:// or static:, or not at all.",
)
@click.option("--runs", type=click.IntRange(1), default=1, help="Runs of each row.")
@click.argument("names", nargs=-1, type=click.Choice(list(rows.ROWS)))
def command(quick: bool, markdown: bool, members: str, runs: int, names: tuple[str, ...]) -> int:
    """Measure clusters of real daemons: all rows, or those named."""
    console = Console(width=200)
    chosen = [name for name in names or rows.ROWS for _ in range(runs)]
    extents = QUICK_EXTENTS if quick else FULL_EXTENTS
    with tempfile.TemporaryDirectory() as folder, SeaweedFS(Path(folder, "s3")) as server:
        results, good = rows.measure(
            chosen, Path(folder), server, MEMBERS[members], extents, lambda row: print(row, file=sys.stderr)
        )
    console.print(results.markdown() if markdown else results.rich(), soft_wrap=markdown, markup=not markdown)
    return 0 if good else 1
