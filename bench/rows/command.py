"""Command line of `python -m bench rows`: runs of all readers of a format alternate."""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import click
from rich.console import Console

from bench.compare import PEERS_PYTHON
from bench.grid import Grid, spread
from bench.rows.corpus import WRITERS
from bench.rows.readers import OTHERS, OURS, TABLES
from testbed.node import Daemon

ASKED = 1.5
"""Rows a second of ours over those of the best other reader."""
WORKERS = (0, 2)
TABLES_PYTHON = ".venv-tables/bin/python"
"""Hugging Face `datasets` and polars; their requirements contradict those of the other peers."""
WRITTEN_BY = {**dict.fromkeys(("jsonl", "csv", "parquet"), OURS), "arrow": "tables"}
Rates = dict[str, list[float]]


class Failed(Exception):
    """A process of the bench ended; its argument is the reason."""


class _Reader:
    """A process that reads one format, and is idle between its runs."""

    def __init__(self, process: subprocess.Popen[str], rows: int) -> None:
        self._process = process
        self._answer(rows)

    def rate(self, seconds: float) -> float:
        """Return rows a second."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{seconds}\n")
        self._process.stdin.flush()
        return float(self._line())

    def _answer(self, rows: int) -> None:
        line = self._line()
        if line.split() != ["ready", str(rows)]:
            raise Failed(f"NOT EACH ROW ONCE: {line} instead of {rows}")

    def _line(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:  # libraries print lines of their own
            if line.startswith("ready") or line[:1].isdigit():
                return line.strip()
        assert self._process.stderr is not None
        said = self._process.stderr.read().strip().splitlines()
        raise Failed(f"FAILED: {said[-1][:160] if said else 'no output'}")


def _python(reader: str) -> str:
    """Return the interpreter that a reader, or the writer of a format, runs in."""
    python = {OURS: sys.executable, "tables": TABLES_PYTHON}.get(reader, PEERS_PYTHON)
    if not shutil.which(python):
        raise Failed(f"NOT INSTALLED: no {python}; run `make {Path(PEERS_PYTHON).parts[0]}/.ready`")
    return python


def _write(format: str, folder: Path, rows: int) -> None:
    folder.mkdir(parents=True)
    command = [
        _python(WRITTEN_BY.get(format, "others")),
        "-W",
        "ignore",
        "-m",
        "bench.rows",
        "write",
        format,
        str(folder),
        str(rows),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise Failed(f"NOT WRITTEN: {done.stderr.strip().splitlines()[-1][:160]}")


@contextmanager
def _reading(
    reader: str, format: str, folder: Path, workers: int, rows: int, env: dict[str, str]
) -> Iterator[_Reader]:
    command = [
        _python("tables" if reader in TABLES else reader),
        "-W",
        "ignore",
        "-m",
        "bench.rows",
        "read",
        reader,
        format,
        str(folder),
        f"{workers}",
    ]
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command,
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        text=True,
        env={**os.environ, "CACHESVC": "require", **env},
        start_new_session=True,
    )
    try:
        yield _Reader(process, rows)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its workers, too
        process.communicate()


def measure(
    format: str, folder: Path, workers: int, rows: int, runs: int, seconds: float, env: dict[str, str]
) -> tuple[Rates, dict[str, str]]:
    """Return the rates of each reader over alternating runs, and the reasons of those that cannot run."""
    rates: Rates = {}
    reasons: dict[str, str] = {}
    with ExitStack() as stack:
        readers: dict[str, _Reader] = {}
        for name in (OURS, *OTHERS[format]):
            try:
                readers[name] = stack.enter_context(_reading(name, format, folder, workers, rows, env))
            except Failed as error:
                reasons[name] = str(error)
        for _ in range(runs):
            for name, reader in readers.items():
                rates.setdefault(name, []).append(reader.rate(seconds))
    return rates, reasons


def _rows_of(format: str, workers: int, rates: Rates, reasons: dict[str, str]) -> Iterator[tuple[str, ...]]:
    best = max((statistics.median(found) for name, found in rates.items() if name != OURS), default=0.0)
    for name in (OURS, *OTHERS[format]):
        if name in reasons:
            yield format, f"{workers}", name, reasons[name]
            continue
        ratio = f"{statistics.median(rates[name]) / best:.2f}" if best else ""
        yield format, f"{workers}", name, spread(rates[name]), ratio


@click.command("rows")
@click.argument("formats", nargs=-1, type=click.Choice(list(WRITERS)))
@click.option("--rows", default=50_000, help="Rows of each data set.")
@click.option("--runs", default=5, help="Runs of each reader, which alternate.")
@click.option("--seconds", default=1.0, help="Length of a run.")
@click.option("--markdown", is_flag=True, help="Print the table as Markdown.")
def command(formats: tuple[str, ...], rows: int, runs: int, seconds: float, markdown: bool) -> None:
    """Read rows of a text of about 500 bytes and a label, warm, in process and with two workers."""
    console, lines = Console(width=150), list[tuple[str, ...]]()
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        with Daemon(root / "node", ["--ram", "2GiB", "--allow", f"{root}/"]) as daemon:
            for format in formats or WRITERS:
                try:
                    _write(format, root / format, rows)
                except Failed as error:
                    lines.append((format, "", "", str(error)))
                    continue
                for workers in WORKERS:
                    rates = measure(format, root / format, workers, rows, runs, seconds, daemon.env)
                    for line in _rows_of(format, workers, *rates):
                        print(*line, sep="  ", file=sys.stderr, flush=True)
                        lines.append(line)
    head = ("format", "workers", "reader", "rows/s", "over the best other reader")
    grid = Grid(
        f"Rows of a text and a label, batch 64, shuffled, default collation; asked: {ASKED}", head, lines
    )
    console.print(grid.markdown() if markdown else grid.rich(), soft_wrap=markdown, markup=not markdown)
