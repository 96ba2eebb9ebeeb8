"""Shuffled batches out of the NVMe tier with the page cache cold, against fio over the same files, or where it is not
installed, against a plain loop of reads in the same order."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench import fio
from loader import DataLoader, open_dataset

RECORD_BYTES = 27 * 4096
RECORDS = 4096
BATCH = 64
RUNS = 5
ASKED = 0.9


@dataclass(frozen=True)
class Cold:
    """Rates in bytes a second, runs in turn; `against` names the limit."""

    against: str
    ours: list[float]
    limit: list[float]

    @property
    def ratio(self) -> float:
        """Median of the ratios of neighbouring runs."""
        return statistics.median(a / b for a, b in zip(self.ours, self.limit))

    def row(self) -> tuple[str, ...]:
        """For the table."""
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
    """One file of records on the disk that the tier is on: what is uploaded, and what the limit reads."""
    path.parent.mkdir(parents=True)
    np.random.default_rng(5).integers(0, 256, RECORDS * RECORD_BYTES, np.uint8).tofile(path)


def forget(files: Sequence[Path]) -> None:
    """Have the page cache drop these files."""
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)  # what is not on the disk yet cannot be dropped
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def measure(uri: str, local: Path, tier: Path) -> list[Cold]:
    """Epochs of ours and of each limit in turn, each cold."""
    dataset = open_dataset(uri, format="records", record_bytes=RECORD_BYTES)
    batches = DataLoader(dataset, batch_size=BATCH, shuffle=True, drop_last=True)
    order: list[np.ndarray] = []
    for _ in batches:
        order.append(batches.indices.copy())
    size = sum(map(len, order)) * RECORD_BYTES
    extents = [path for path in tier.glob("**/extents/**/*") if path.is_file()]
    limits = fio.limits(extents, RECORD_BYTES, BATCH) or {"plain preadv loop": lambda: _bare(local, order)}
    found = {name: Cold(name, [], []) for name in limits}
    for _ in range(RUNS):
        batches.set_epoch(0)
        forget(extents)
        started = time.perf_counter()
        for _ in batches:
            pass
        took = time.perf_counter() - started
        for name, rate in limits.items():
            forget([*extents, local])
            found[name].ours.append(size / took)
            found[name].limit.append(rate())
    assert batches.stats().bytes_by_origin["nvme"] == size, "the tier did not hold the dataset"
    dataset.close()
    return list(found.values())


def _bare(local: Path, order: Sequence[np.ndarray]) -> float:
    """Bytes a second of the same records in the same batches from one file, announced to the kernel in the order of
    the disk and read with preadv, and nothing else."""
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
