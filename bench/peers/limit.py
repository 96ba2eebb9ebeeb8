"""What no loader can beat: the same samples in a random order out of the page cache, and nothing else.

Fixed samples by one numpy gather a batch; blobs by a plain loop of copies. Cold: `s5cmd cp` to memory alone.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.peers import corpus
from bench.peers.fetched import s5cmd
from bench.peers.peer import Batches, Job, replayed


def write(job: Job) -> None:
    """The corpus itself, as `s5cmd` gets it."""
    shutil.copy(Path(job.corpus, f"{job.kind}.bin"), job.folder)


def batches(job: Job) -> Batches:
    """A new order each epoch."""
    if job.remote:
        return _Copied(job)
    return _Gathered(job) if job.kind != "blobs" else _Looped(job)


def halfway(job: Job) -> Callable[[], Iterator[Any]]:
    """There is nothing to keep."""
    return replayed(lambda: batches(job), job.samples // job.batch_size // 2)


class _Gathered:
    def __init__(self, job: Job) -> None:
        self._flat, self._job, self._draw = corpus.fixed(job.corpus, job.kind), job, np.random.default_rng(0)

    def __iter__(self) -> Iterator[torch.Tensor]:
        order, size = self._draw.permutation(self._job.samples), self._job.batch_size
        for start in range(0, len(order), size):
            yield torch.from_numpy(np.take(self._flat, order[start : start + size], axis=0))


class _Looped:
    """Into one buffer that every batch reuses, which no loader may do."""

    def __init__(self, job: Job) -> None:
        flat, bounds = corpus.blobs(job.corpus)
        self._flat, self._bounds, self._job = np.asarray(flat), bounds.tolist(), job
        self._draw = np.random.default_rng(0)
        self._buffer = np.empty(job.batch_size * 2 * corpus.BLOB_BYTES, np.uint8)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, list[int]]]:
        order, size = self._draw.permutation(self._job.samples).tolist(), self._job.batch_size
        for start in range(0, len(order), size):
            yield self._copied(order[start : start + size])

    def _copied(self, chosen: list[int]) -> tuple[torch.Tensor, list[int]]:
        flat, bounds, buffer, at, sizes = self._flat, self._bounds, self._buffer, 0, []
        for one in chosen:
            low, high = bounds[one], bounds[one + 1]
            buffer[at : at + high - low] = flat[low:high]
            at += high - low
            sizes.append(high - low)
        return torch.from_numpy(buffer[:at]), sizes


class _Copied:
    """One batch: everything that s5cmd brought."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def __iter__(self) -> Iterator[tuple[torch.Tensor, list[int]]]:
        folder = s5cmd(self._job)
        body = np.fromfile(folder / f"{self._job.kind}.bin", np.uint8)
        yield torch.from_numpy(body), [1] * self._job.samples
