"""Slow samples: one in twenty takes twenty times as long as the others, in eight worker processes.

The samples sleep instead of working, so that eight workers need no eight cores. The ideal is the sum of their costs over
eight workers; torch's own loader reads the same dataset with the same arguments.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader as TorchDataLoader

from loader import DataLoader, open_dataset

SAMPLES, WORKERS, RUNS = 9_600, 8, 3
COST_S, SLOW, EVERY = 0.002, 20, 20
BATCHES = (8, 32, 64)
ASKED = 0.95


@dataclass(frozen=True, slots=True)
class Row:
    """Ratios of the ideal to the time of an epoch after its first batch, so without the start of workers."""

    batch_size: int
    ours: list[float]
    torchs: list[float]

    @property
    def met(self) -> bool:
        """Whether the median reaches what is asked."""
        return statistics.median(self.ours) >= ASKED

    def cells(self) -> tuple[str, ...]:
        """Return the cells of a table's row."""
        ours, torchs = (
            f"{statistics.median(each):.2f} ({min(each):.2f}-{max(each):.2f})"
            for each in (self.ours, self.torchs)
        )
        return f"batches of {self.batch_size}", ours, torchs, f">= {ASKED}", "yes" if self.met else "NO"


def cost_s(sample: torch.Tensor) -> float:
    """Return the time that a sample takes."""
    return COST_S * (SLOW if int(sample[0]) % EVERY == 0 else 1)


def slowly(sample: torch.Tensor) -> torch.Tensor:
    """Take a sample's time."""
    time.sleep(cost_s(sample))
    return sample


def measure(folder: Path) -> list[Row]:
    """Time our loader and torch's in turn."""
    folder.mkdir()
    records = np.random.default_rng(1).integers(0, 1 << 40, (SAMPLES, 16), dtype="<i8")
    records.tofile(folder / "records.bin")
    os.environ["CACHESVC"] = "off"
    try:
        data: Any = open_dataset(
            str(folder), format="records", dtype="<i8", record_bytes=128, transform=slowly
        )
        rows = []
        for batch_size in BATCHES:
            row = Row(batch_size, [], [])
            for _ in range(RUNS):
                row.ours.append(_ratio(DataLoader(data, batch_size, shuffle=True, num_workers=WORKERS)))
                row.torchs.append(
                    _ratio(TorchDataLoader(data, batch_size, shuffle=True, num_workers=WORKERS))
                )
            rows.append(row)
        return rows
    finally:
        del os.environ["CACHESVC"]


def _ratio(batches: Iterable[torch.Tensor]) -> float:
    reading, ideal_s = iter(batches), 0.0
    next(reading)
    began = time.perf_counter()
    for batch in reading:
        ideal_s += sum(map(cost_s, batch)) / WORKERS
    return ideal_s / (time.perf_counter() - began)
