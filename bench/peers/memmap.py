"""A hand-written Dataset over np.memmap for packed data, as nanoGPT and Megatron read tokens."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from bench.peers import corpus, plain
from bench.peers.fetched import local
from bench.peers.peer import Batches, Job


def write(job: Job) -> None:
    """Link the corpus itself."""
    for path in Path(job.corpus).glob(f"{job.kind}.*"):
        os.link(path, Path(job.folder, path.name))


def batches(job: Job) -> Batches:
    """Map the corpus before workers fork, so that they share the mapping."""
    folder = str(local(job))
    return plain.loader(job, _Fixed(folder, job) if job.kind in corpus.DTYPE else _Uneven(folder, job))


class _Fixed(Dataset[Any]):
    """Yields rows as views, which collation copies once. Slices a plain array, since slicing a memmap costs more."""

    def __init__(self, folder: str, job: Job) -> None:
        self._flat = np.asarray(corpus.fixed(folder, job.kind))

    def __len__(self) -> int:
        return len(self._flat)

    def __getitem__(self, index: int) -> Any:
        return self._flat[index]


class _Uneven(Dataset[Any]):
    def __init__(self, folder: str, job: Job) -> None:
        flat, bounds = corpus.uneven(folder, job.kind)
        self._view, self._bounds = np.asarray(flat), bounds

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def __getitem__(self, index: int) -> Any:
        return self._view[self._bounds[index] : self._bounds[index + 1]].tobytes()
