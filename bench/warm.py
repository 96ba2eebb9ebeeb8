"""Warm epochs through the daemon, without workers, against the bare copy of the same bytes in the same order."""

from __future__ import annotations

import io
import statistics
import tarfile
import time
import timeit
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from loader import DataLoader, Dataset, open_dataset
from loader.batches.epoch_report import EpochReport

BATCH = 64
RUNS = 3
STEPS_TIMED = 100_000
RECORD_BYTES = 3072
SEQ_LEN = 2048
BLOB_BYTES = 110_000
VARIED_BYTES = 3_000
SHARDS = 8


@dataclass(frozen=True)
class Figure:
    """One comparison: rates of ours and of the limit in samples/s, from alternating runs."""

    name: str
    ours: list[float]
    limit: list[float]
    asked: float

    @property
    def ratio(self) -> float:
        """Median of the ratios of paired runs."""
        return statistics.median(a / b for a, b in zip(self.ours, self.limit))

    def row(self) -> tuple[str, ...]:
        """Cells of the table row."""
        return (
            self.name,
            f"{statistics.median(self.ours):,.0f}/s",
            f"{statistics.median(self.limit):,.0f}/s",
            f"{self.ratio:.2f} ({min(a / b for a, b in zip(self.ours, self.limit)):.2f}-"
            f"{max(a / b for a, b in zip(self.ours, self.limit)):.2f})",
            f">= {self.asked:.2f}",
            "yes" if self.ratio >= self.asked else "NO",
        )


def write_data(folder: Path, samples: int = 150_000, blobs: int = 4_000, varied: int = 60_000) -> None:
    """Write fixed 3 KB records, uint16 tokens, and tar shards of blobs (about 110 KB) and of records (about 3 KB)."""
    rng = np.random.default_rng(0)
    for name in ("records", "tokens", "blobs", "varied"):
        (folder / name).mkdir(parents=True)
    rng.integers(0, 256, samples * RECORD_BYTES, np.uint8).tofile(folder / "records" / "records.bin")
    rng.integers(0, 50_000, 60_000 * SEQ_LEN, np.uint16).tofile(folder / "tokens" / "tokens.bin")
    write_tars(folder / "blobs", rng, rng.integers(BLOB_BYTES // 2, BLOB_BYTES * 3 // 2, blobs))
    write_tars(folder / "varied", rng, rng.integers(VARIED_BYTES // 2, VARIED_BYTES * 3 // 2, varied))


def write_tars(folder: Path, rng: np.random.Generator, sizes: np.ndarray) -> None:
    """Write members of these sizes to several tar shards."""
    for shard, part in enumerate(np.array_split(sizes, SHARDS)):
        with tarfile.open(folder / f"{shard:02d}.tar", "w") as tar:
            for number, size in enumerate(part.tolist()):
                entry = tarfile.TarInfo(f"{shard:02d}{number:06d}.bin")
                entry.size = size
                tar.addfile(entry, io.BytesIO(rng.bytes(size)))


def rate(batches: Iterator[object], samples: int) -> float:
    """Samples per second of one pass."""
    started = time.perf_counter()
    for _ in batches:
        pass
    return samples / (time.perf_counter() - started)


def compare(name: str, asked: float, batches: DataLoader, limit: Callable[[np.ndarray], object]) -> Figure:
    """Alternate runs of ours and the limit, which reads in the order that ours delivered."""
    order: list[np.ndarray] = []
    for _ in batches:
        order.append(batches.indices.copy())
    samples = sum(map(len, order))
    ours, limits = [], []
    for _ in range(RUNS):
        ours.append(rate(iter(batches), samples))
        limits.append(rate((limit(ids) for ids in order), samples))
    return Figure(name, ours, limits, asked)


def measure(bucket: str, folder: Path) -> list[Figure]:
    """Measure the four kinds of data, and the cost of the stall clock."""
    common: dict[str, Any] = {"batch_size": BATCH, "shuffle": True, "drop_last": True}
    records = open_dataset(f"{bucket}/records/", format="records", record_bytes=RECORD_BYTES)
    flat = np.memmap(folder / "records" / "records.bin", np.uint8, "r").reshape(-1, RECORD_BYTES)
    first = compare(
        "3 KB records", 0.5, DataLoader(records, **common), lambda ids: np.take(flat, ids, axis=0)
    )

    tokens = open_dataset(f"{bucket}/tokens/", format="tokens", dtype="uint16", seq_len=SEQ_LEN)
    sequences = np.memmap(folder / "tokens" / "tokens.bin", np.uint16, "r").reshape(-1, SEQ_LEN)
    second = compare(
        "2,048 x uint16", 0.5, DataLoader(tokens, **common), lambda ids: np.take(sequences, ids, axis=0)
    )

    whole, starts, ends = packed(blobs := open_dataset(f"{bucket}/blobs/", decode=None, fields=("bin",)))

    def copy(ids: np.ndarray) -> None:
        for i in ids:
            bytes(whole[starts[i] : ends[i]])

    third = compare("110 KB blobs", 0.6, DataLoader(blobs, **common), copy)

    varied = open_dataset(f"{bucket}/varied/", decode=None)
    rows, lows, highs = packed(varied)

    def join(ids: np.ndarray) -> None:
        b"".join([rows[lows[i] : highs[i]] for i in ids.tolist()])

    as_bytes = DataLoader(varied, collate_fn=list, **common)
    fourth = compare("records of 1.5 to 4.5 KB", 0.4, as_bytes, join)
    return [first, without_stall_clock(first), second, third, fourth]


def without_stall_clock(timed: Figure) -> Figure:
    """Compare the same runs with the rates that they would have reached without the stall clock."""
    account = EpochReport(has_reports=False, has_workers=False)

    def step() -> None:
        account.record(time.perf_counter(), (0, 0), 1)

    cost_s = min(timeit.repeat(step, number=STEPS_TIMED)) / STEPS_TIMED
    free = [1 / (1 / each - cost_s / BATCH) for each in timed.ours]
    return Figure(f"{timed.name}, were the stall clock free", timed.ours, free, 0.99)


def packed(data: Dataset) -> tuple[memoryview, list[int], list[int]]:
    """All samples end to end, and the offsets where each begins and ends."""
    each = [one[0] if isinstance(one, tuple) else one for one in (data[i] for i in range(len(data)))]
    ends = np.cumsum([len(one) for one in each])
    return memoryview(b"".join(each)), [0, *ends[:-1].tolist()], ends.tolist()
