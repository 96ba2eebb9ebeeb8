"""Slow samples: one in twenty takes twenty times as long as the others, in eight worker processes.

The samples sleep instead of working, so that eight workers need no eight cores. The ideal is the sum of their costs over
eight workers; torch's own loader and MosaicML Streaming read the same samples with the same arguments.
"""

from __future__ import annotations

import inspect
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader as TorchDataLoader

from bench.compare import PEERS_PYTHON
from loader import DataLoader, open_dataset
from testbed import ROOT

SAMPLES, WORKERS, RUNS = 9_600, 8, 3
COST_S, SLOW, EVERY = 0.002, 20, 20
BATCHES = (8, 32, 64)
ASKED = 0.95
COLUMNS = ("a slow sample in twenty", "of the ideal", "p50 of next()", "p99", "p99.9", "asked", "met")


def _timed(batches: Iterable[torch.Tensor]) -> tuple[float, list[float]]:
    """Return the ideal of an epoch after its first batch, and the times of its calls of next()."""
    reading, ideal_s, waits = iter(batches), 0.0, list[float]()
    next(reading)
    asked = time.perf_counter()
    for batch in reading:
        now = time.perf_counter()
        waits.append(now - asked)
        asked = now
        ideal_s += sum(map(cost_s, batch)) / WORKERS
    return ideal_s, waits


_STREAMING = f"""
from __future__ import annotations
import json, sys, time
import numpy as np
from bench.peers.mosaic import MDSWriter, StreamingDataLoader, StreamingDataset, clean_stale_shared_memory
WORKERS, batch_size, folder = {WORKERS}, int(sys.argv[1]), sys.argv[2]
if not batch_size:
    with MDSWriter(out=folder, columns={{"x": "ndarray:int64:16"}}) as writer:
        for row in np.random.default_rng(1).integers(0, 1 << 40, ({SAMPLES}, 16), np.int64):
            writer.write({{"x": row}})
    raise SystemExit
def cost_s(row):
    return {COST_S} * ({SLOW} if int(row[0]) % {EVERY} == 0 else 1)
class Slow(StreamingDataset):
    def __getitem__(self, number):
        row = super().__getitem__(number)["x"]
        time.sleep(cost_s(row))
        return row
clean_stale_shared_memory()
data = Slow(local=folder, shuffle=True, batch_size=batch_size)
{inspect.getsource(_timed)}
batches = StreamingDataLoader(data, batch_size=batch_size, num_workers=WORKERS)
print(json.dumps(_timed(batches)))
"""


@dataclass(frozen=True, slots=True)
class Row:
    """Ratios of the ideal to the time of an epoch after its first batch, so without the start of workers, run by run, and
    the times of all calls of next()."""

    batch_size: int
    loader: str
    ratios: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)

    @property
    def ours(self) -> bool:
        """Whether it has a limit."""
        return self.loader == "ours"

    @property
    def met(self) -> bool:
        """Whether the median reaches what is asked."""
        return not self.ours or statistics.median(self.ratios) >= ASKED

    def add(self, ideal_s: float, waits: list[float]) -> None:
        """Add a run."""
        self.ratios.append(ideal_s / sum(waits))
        self.waits.extend(waits)

    def cells(self) -> tuple[str, ...]:
        """Return the cells of a table's row."""
        ratio = f"{statistics.median(self.ratios):.2f} ({min(self.ratios):.2f}-{max(self.ratios):.2f})"
        shares = (f"{each * 1e3:.1f} ms" for each in np.quantile(self.waits, (0.5, 0.99, 0.999)))
        limit = (f">= {ASKED}", "yes" if self.met else "NO") if self.ours else ("", "")
        return f"batches of {self.batch_size}, {self.loader}", ratio, *shares, *limit


def cost_s(sample: torch.Tensor) -> float:
    """Return the time that a sample takes."""
    return COST_S * (SLOW if int(sample[0]) % EVERY == 0 else 1)


def slowly(sample: torch.Tensor) -> torch.Tensor:
    """Take a sample's time."""
    time.sleep(cost_s(sample))
    return sample


def measure(folder: Path) -> list[Row]:
    """Time all loaders in turn. Streaming is left out where it is not installed."""
    folder.mkdir()
    records = np.random.default_rng(1).integers(0, 1 << 40, (SAMPLES, 16), dtype="<i8")
    records.tofile(folder / "records.bin")
    os.environ["CACHESVC"] = "off"
    try:
        with tempfile.TemporaryDirectory() as shards:
            data: Any = open_dataset(
                str(folder), format="records", dtype="<i8", record_bytes=128, transform=slowly
            )
            streams = os.access(PEERS_PYTHON, os.X_OK)
            if streams:
                _streaming(0, shards)
            return [
                row for batch_size in BATCHES for row in _rows(data, batch_size, shards if streams else "")
            ]
    finally:
        del os.environ["CACHESVC"]


def _rows(data: Any, batch_size: int, shards: str) -> list[Row]:
    names = ("ours", "torch's DataLoader", "MosaicML Streaming")
    ours, torchs, streaming = rows = [Row(batch_size, name) for name in names]
    for _ in range(RUNS):
        ours.add(*_timed(DataLoader(data, batch_size, shuffle=True, num_workers=WORKERS)))
        torchs.add(*_timed(TorchDataLoader(data, batch_size, shuffle=True, num_workers=WORKERS)))
        if shards:
            streaming.add(*_streaming(batch_size, shards))
    return rows if shards else rows[:2]


def _streaming(batch_size: int, shards: str) -> tuple[float, list[float]]:
    command = [PEERS_PYTHON, "-c", _STREAMING, str(batch_size), shards]
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, cwd=ROOT, env=environment)
    ideal_s, waits = json.loads((done.stdout.splitlines() or ["[0, []]"])[-1])
    return ideal_s, waits
