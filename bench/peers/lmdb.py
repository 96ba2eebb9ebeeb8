"""A hand-written Dataset over LMDB, as people use it for small records.

Set up as its documentation and the well-known ImageNet recipes say: read-only, lock=False, readahead off (reads are
random), meminit off, one environment per process, opened lazily (it must not cross a fork), one long read
transaction, and buffers=True, so that values are views of the map.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
from torch.utils.data import Dataset

from bench.peers import corpus, plain
from bench.peers.fetched import local
from bench.peers.peer import Batches, Job

_COMMIT_EVERY = 10_000


def write(job: Job) -> None:
    """Write one environment of one file; keys are big-endian numbers."""
    room = 2 * corpus.size_bytes(Path(job.corpus), job.kind) + (64 << 20)
    environment = lmdb.open(str(Path(job.folder, "data.lmdb")), subdir=False, map_size=room, sync=False)
    transaction = environment.begin(write=True)
    for number, sample in enumerate(corpus.each(job)):
        transaction.put(number.to_bytes(8, "big"), sample.tobytes(), append=True)
        if number % _COMMIT_EVERY == 0:
            transaction.commit()
            transaction = environment.begin(write=True)
    transaction.commit()
    environment.close()
    Path(job.folder, "data.lmdb-lock").unlink()


def batches(job: Job) -> Batches:
    """Read samples by number. The environment is opened by the first read."""
    return plain.loader(job, _Values(local(job) / "data.lmdb", job))


@functools.cache
def _opened(path: str, pid: int) -> Any:
    """Open an environment once per process, as LMDB requires, however many loaders read it."""
    return lmdb.open(path, subdir=False, readonly=True, lock=False, readahead=False, meminit=False)


class _Values(Dataset[Any]):
    def __init__(self, path: Path, job: Job) -> None:
        self._path, self._samples = str(path), job.samples
        self._dtype = corpus.DTYPE.get(job.kind)
        self._transaction: Any = None

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> Any:
        if self._transaction is None:
            environment = _opened(self._path, os.getpid())
            self._transaction = environment.begin(buffers=True)
        value = self._transaction.get(index.to_bytes(8, "big"))
        return bytes(value) if self._dtype is None else np.frombuffer(value, self._dtype)
