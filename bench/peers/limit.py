"""The limit that no loader can beat: only copy the same samples, in a random order, from the page cache.

Fixed samples take one numpy gather per batch, `varied` a join of slices, `blobs` a plain loop of copies. Images are
decoded and dropped, in one process or thread per worker. The cold limit is `s5cmd cp` into memory.
"""

from __future__ import annotations

import functools
import itertools
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.peers import corpus, pictures
from bench.peers.fetched import s5cmd
from bench.peers.peer import Batches, Job, Kind


def write(job: Job) -> None:
    """Copy the corpus itself, for `s5cmd` to fetch."""
    shutil.copy(Path(job.corpus, f"{job.kind}.bin"), job.folder)


def batches(job: Job) -> Batches:
    """Copy every sample once per epoch, in a new order each time."""
    if job.remote:
        return _Copied(job)
    made: dict[Kind, Callable[[Job], Batches]] = {"varied": _Joined, "blobs": _Looped, "images": _Decoded}
    return made.get(job.kind, _Gathered)(job)


class _Gathered:
    def __init__(self, job: Job) -> None:
        self._flat, self._job, self._draw = corpus.fixed(job.corpus, job.kind), job, np.random.default_rng(0)

    def __iter__(self) -> Iterator[torch.Tensor]:
        order, size = self._draw.permutation(self._job.samples), self._job.batch_size
        for start in range(0, len(order), size):
            yield torch.from_numpy(np.take(self._flat, order[start : start + size], axis=0))


class _Joined:
    """Joins each batch into new memory."""

    def __init__(self, job: Job) -> None:
        flat, bounds = corpus.uneven(job.corpus, job.kind)
        self._memory, self._bounds, self._sizes = flat.data, bounds, np.diff(bounds)
        self._job, self._draw = job, np.random.default_rng(0)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        order, size = self._draw.permutation(self._job.samples), self._job.batch_size
        memory, bounds = self._memory, self._bounds
        for start in range(0, len(order), size):
            chosen = order[start : start + size]
            lows, sizes = bounds[chosen], self._sizes[chosen]
            places = zip(lows.tolist(), (lows + sizes).tolist(), strict=True)
            joined = bytearray().join([memory[low:high] for low, high in places])
            ends = np.concatenate([[0], np.cumsum(sizes)])
            yield torch.frombuffer(joined, dtype=torch.uint8), torch.from_numpy(ends)


class _Looped:
    """Copies into one buffer that every batch reuses, which no loader may do."""

    def __init__(self, job: Job) -> None:
        flat, bounds = corpus.uneven(job.corpus, job.kind)
        self._flat, self._bounds, self._job = np.asarray(flat), bounds.tolist(), job
        self._draw = np.random.default_rng(0)
        self._buffer = np.empty(job.batch_size * 2 * corpus.MEAN_BYTES[job.kind], np.uint8)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        order, size = self._draw.permutation(self._job.samples).tolist(), self._job.batch_size
        for start in range(0, len(order), size):
            yield self._copied(order[start : start + size])

    def _copied(self, chosen: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        flat, bounds, buffer, at, ends = self._flat, self._bounds, self._buffer, 0, [0]
        for one in chosen:
            low, high = bounds[one], bounds[one + 1]
            buffer[at : at + high - low] = flat[low:high]
            at += high - low
            ends.append(at)
        return torch.from_numpy(buffer[:at]), torch.tensor(ends)


class _Decoded:
    """Runs the decoder alone, from memory, in `workers` processes or threads. Only one value of each image comes back,
    expanded to the shape of a real batch."""

    def __init__(self, job: Job) -> None:
        self._job, self._draw = job, np.random.default_rng(0)
        pool = ThreadPoolExecutor if job.threads else ProcessPoolExecutor
        self._pool: Executor = pool(max(1, job.workers))

    def __iter__(self) -> Iterator[torch.Tensor]:
        order, size = self._draw.permutation(self._job.samples), self._job.batch_size
        shares = [order[start : start + size] for start in range(0, len(order), size)]
        for firsts in self._pool.map(_first_values, itertools.repeat(self._job), shares):
            shape = (-1, pictures.CUT, pictures.CUT, 3)
            yield torch.from_numpy(firsts).reshape(-1, 1, 1, 1).expand(shape)


def _first_values(job: Job, chosen: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Decode these images; return the first value of each."""
    flat, bounds = _images(job)
    images = (pictures.decoded(flat[bounds[one] : bounds[one + 1]]) for one in chosen)
    return np.array([image[0, 0, 0] for image in images], np.uint8)


@functools.cache
def _images(job: Job) -> tuple[corpus.Array, corpus.Array]:
    """The images of a job, mapped once per process."""
    return corpus.uneven(job.corpus, job.kind)


class _Copied:
    """Copies everything with s5cmd; yields it as one batch."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        folder = s5cmd(self._job)
        body = np.fromfile(folder / f"{self._job.kind}.bin", np.uint8)
        yield torch.from_numpy(body), torch.zeros(self._job.samples + 1, dtype=torch.int64)
