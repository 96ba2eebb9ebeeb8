"""Command line of `python -m bench peers`."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import click
from rich.console import Console

from bench import compare, figures
from testbed.servers import SeaweedFS

RESULTS = Path("bench/results")


@click.command("peers")
@click.option(
    "--quick",
    is_flag=True,
    help="Try whether everything runs: small data, one short run each. The figures mean nothing.",
)
@click.option("--markdown", is_flag=True, help="Print the tables as docs/measured.md has them.")
@click.option(
    "--peer", "peers", multiple=True, help="Measure only this peer (repeatable) beside ours and the limit."
)
def command(quick: bool, markdown: bool, peers: tuple[str, ...]) -> None:
    """Measure every loader over the same data. Writes single runs to bench/results."""
    console, started = Console(width=150), time.monotonic()
    RESULTS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        with SeaweedFS(root / "s3") as s3:
            scale = compare.QUICK if quick else compare.FULL
            results = compare.Bench(root, s3, scale, peers or compare.OTHERS).run()
    (RESULTS / "peers.json").write_text(results.as_json())
    for grid in figures.grids(results):
        console.print(grid.markdown() if markdown else grid.rich(), soft_wrap=markdown, markup=not markdown)
    console.print(f"{time.monotonic() - started:.0f} s; single runs in {RESULTS}/peers.json")
