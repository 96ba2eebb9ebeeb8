"""Shuffled batches from the NVMe tier with a cold page cache, against fio over the same files; where fio is not
installed, against a plain loop of reads in the same order."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.storage import fio
from loader import DataLoader, open_dataset
from testbed.memory import drop_page_cache

RECORD_BYTES = 27 * 4096
RECORDS = 4096
BATCH = 64
RUNS = 5
ASKED = 0.9


@dataclass(frozen=True)
class Cold:
    """Rates of alternating runs in bytes per second; `against` names the limit."""

    against: str
    ours: list[float]
    limit: list[float]

    @property
    def ratio(self) -> float:
        """Median of the ratios of paired runs."""
        return statistics.median(a / b for a, b in zip(self.ours, self.limit))

    def row(self) -> tuple[str, ...]:
        """Cells of the table row."""
        ratios = [a / b for a, b in zip(self.ours, self.limit)]
        return (
            self.against,
            f"{statistics.median(self.ours) / 1e6:,.0f} MB/s",
            f"{statistics.median(self.limit) / 1e6:,.0f} MB/s",
            f"{self.ratio:.2f} ({min(ratios):.2f}-{max(ratios):.2f})",
            f">= {ASKED:.2f}",
            "yes" if self.ratio >= ASKED else "NO",
        )


def write_data(path: Path) -> None:
    """Write one file of records on the tier's disk. It is uploaded as the dataset, and the limit reads it."""
    path.parent.mkdir(parents=True)
    np.random.default_rng(5).integers(0, 256, RECORDS * RECORD_BYTES, np.uint8).tofile(path)


def measure(uri: str, local: Path, tier: Path) -> list[Cold]:
    """Alternate cold epochs of ours and of each limit."""
    dataset = open_dataset(uri, format="records", record_bytes=RECORD_BYTES)
    batches = DataLoader(dataset, batch_size=BATCH, shuffle=True, drop_last=True)
    order: list[np.ndarray] = []
    for _ in batches:
        order.append(batches.indices.copy())
    size = sum(map(len, order)) * RECORD_BYTES
    extents = [path for path in tier.glob("**/extents/**/*") if path.is_file()]
    limits = fio.limits(extents, RECORD_BYTES, BATCH) or {"plain preadv loop": lambda: _bare(local, order)}
    results = {name: Cold(name, [], []) for name in limits}
    for _ in range(RUNS):
        batches.set_epoch(0)
        drop_page_cache(extents)
        started = time.perf_counter()
        for _ in batches:
            pass
        took = time.perf_counter() - started
        for name, rate in limits.items():
            drop_page_cache([*extents, local])
            results[name].ours.append(size / took)
            results[name].limit.append(rate())
    assert batches.stats().bytes_by_origin["nvme"] == size, "the tier did not hold the dataset"
    dataset.close()
    return list(results.values())


def _bare(local: Path, order: Sequence[np.ndarray]) -> float:
    """Bytes per second of a loop that reads the same batches from one file: it announces each batch to the kernel in
    disk order, reads it with preadv, and does nothing else."""
    fd = os.open(local, os.O_RDONLY)
    started = time.perf_counter()
    for indices in order:
        memory = memoryview(bytearray(len(indices) * RECORD_BYTES))
        offsets = sorted((indices * RECORD_BYTES).tolist())
        for offset in offsets:
            os.posix_fadvise(fd, offset, RECORD_BYTES, os.POSIX_FADV_WILLNEED)
        for at, offset in enumerate(offsets):
            os.preadv(fd, [memory[at * RECORD_BYTES : (at + 1) * RECORD_BYTES]], offset)
    took = time.perf_counter() - started
    os.close(fd)
    return sum(map(len, order)) * RECORD_BYTES / took
