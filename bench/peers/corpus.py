"""The data that every peer gets, made once: three kinds, from a seed.

records   3,072 random bytes each: small images, rows of features
tokens    2,048 x uint16: sequences for a language model
blobs     55 to 165 KB, 110 KB in the mean: JPEGs at ImageNet size
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bench.peers.peer import Job, Kind

RECORD_BYTES = 3072
SEQ_LEN = 2048
BLOB_BYTES = 110_000
KINDS: tuple[Kind, ...] = ("records", "tokens", "blobs")
BATCH: dict[Kind, int] = {"records": 64, "tokens": 64, "blobs": 32}

Array = np.ndarray[Any, Any]


def write(folder: Path, counts: dict[Kind, int]) -> None:
    """`records.bin`, `tokens.bin`, and `blobs.bin` with the bounds of each blob in `bounds.npy`."""
    draw = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    draw.integers(0, 256, counts["records"] * RECORD_BYTES, np.uint8).tofile(folder / "records.bin")
    draw.integers(0, 50_000, counts["tokens"] * SEQ_LEN, np.uint16).tofile(folder / "tokens.bin")
    sizes = draw.integers(BLOB_BYTES // 2, BLOB_BYTES * 3 // 2, counts["blobs"])
    bounds = np.concatenate(([0], np.cumsum(sizes)))
    np.save(folder / "bounds.npy", bounds)
    (folder / "blobs.bin").write_bytes(draw.bytes(int(bounds[-1])))


def fixed(corpus: str, kind: Kind) -> Array:
    """Records uint8[n, 3072] or sequences uint16[n, 2048], mapped."""
    dtype, width = (np.uint8, RECORD_BYTES) if kind == "records" else (np.uint16, SEQ_LEN)
    return np.memmap(Path(corpus, f"{kind}.bin"), dtype, "r").reshape(-1, width)


def blobs(corpus: str) -> tuple[Array, Array]:
    """All blobs end to end uint8[bytes], mapped, and their bounds int64[n + 1]."""
    return np.memmap(Path(corpus, "blobs.bin"), np.uint8, "r"), np.load(Path(corpus, "bounds.npy"))


def each(job: Job) -> Iterator[Array]:
    """Every sample of the job's kind, in order."""
    if job.kind != "blobs":
        yield from fixed(job.corpus, job.kind)
        return
    flat, bounds = blobs(job.corpus)
    for low, high in itertools.pairwise(bounds):
        yield flat[low:high]


def size_bytes(corpus: Path, kind: Kind) -> int:
    """Of the samples alone."""
    return (corpus / f"{kind}.bin").stat().st_size


def first_bytes(job: Job) -> int:
    """The sum of the first value of every sample: an epoch that has each once has the same."""
    return sum(int(sample[0]) for sample in each(job))
