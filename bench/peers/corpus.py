"""The data that every peer gets, made once from a seed: six kinds.

records   3,072 random bytes each: small images, rows of features
varied    1.5 to 4.5 KB, 3 KB in the mean: rows of text, compressed small images
tokens    2,048 x uint16: sequences for a language model
blobs     55 to 165 KB, 110 KB in the mean: as large as JPEGs at ImageNet size
images    JPEGs of 500 x 375, to be decoded
rows      128 random bytes each, as many as ImageNet has pictures: shows the memory that an index of samples takes
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bench.peers import pictures
from bench.peers.peer import Job, Kind

RECORD_BYTES = 3072
SEQ_LEN = 2048
ROW_BYTES = 128
KINDS: tuple[Kind, ...] = ("records", "varied", "tokens", "blobs", "images", "rows")
BATCH: dict[Kind, int] = {"records": 64, "varied": 64, "tokens": 64, "blobs": 32, "images": 32, "rows": 256}
DTYPE = {"records": np.uint8, "tokens": np.uint16, "rows": np.uint8}
"""Dtypes of the kinds whose samples are arrays of one size. Samples of the other kinds are bytes."""
WIDTH = {"records": RECORD_BYTES, "tokens": SEQ_LEN, "rows": ROW_BYTES}
HIGHEST = {"records": 256, "tokens": 50_000, "rows": 256}
MEAN_BYTES = {"varied": 3_000, "blobs": 110_000}

Array = np.ndarray[Any, Any]


def write(folder: Path, counts: dict[Kind, int]) -> None:
    """Write `KIND.bin`, samples end to end, and for uneven kinds their bounds to `KIND.npy`."""
    folder.mkdir(parents=True, exist_ok=True)
    for kind, count in counts.items():
        draw = np.random.default_rng(KINDS.index(kind))
        if kind in DTYPE:
            draw.integers(0, HIGHEST[kind], count * WIDTH[kind], DTYPE[kind]).tofile(folder / f"{kind}.bin")
            continue
        if kind == "images":
            images = list(pictures.jpegs(draw, count))
            sizes, body = np.array([len(image) for image in images]), b"".join(images)
        else:
            sizes = draw.integers(MEAN_BYTES[kind] // 2, MEAN_BYTES[kind] * 3 // 2, count)
            body = draw.bytes(int(sizes.sum()))
        np.save(folder / f"{kind}.npy", np.concatenate(([0], np.cumsum(sizes))))
        (folder / f"{kind}.bin").write_bytes(body)


def fixed(corpus: str, kind: Kind) -> Array:
    """Records uint8[n, 3072] or sequences uint16[n, 2048], mapped."""
    return np.memmap(Path(corpus, f"{kind}.bin"), DTYPE[kind], "r").reshape(-1, WIDTH[kind])


def uneven(corpus: str, kind: Kind) -> tuple[Array, Array]:
    """All samples end to end uint8[bytes], mapped, and their bounds int64[n + 1]."""
    return np.memmap(Path(corpus, f"{kind}.bin"), np.uint8, "r"), np.load(Path(corpus, f"{kind}.npy"))


def each(job: Job) -> Iterator[Array]:
    """Every sample of the job's kind, in order."""
    if job.kind in DTYPE:
        yield from fixed(job.corpus, job.kind)
        return
    flat, bounds = uneven(job.corpus, job.kind)
    for low, high in itertools.pairwise(bounds):
        yield flat[low:high]


def size_bytes(corpus: Path, kind: Kind) -> int:
    """Bytes of all samples of a kind."""
    return (corpus / f"{kind}.bin").stat().st_size


def first_bytes(job: Job) -> int:
    """Sum of the first value of every sample. An epoch that holds each sample once has the same sum."""
    if job.kind == "images":
        return sum(int(pictures.decoded(sample)[0, 0, 0]) for sample in each(job))
    return sum(int(sample[0]) for sample in each(job))
