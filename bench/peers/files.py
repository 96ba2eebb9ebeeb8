"""A plain DataLoader over one local file per sample, 1,000 files in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from bench.peers import corpus, plain
from bench.peers.fetched import local
from bench.peers.peer import Batches, Job


def write(job: Job) -> None:
    """Write `000/000000.bin`, `000/000001.bin`, ..."""
    for number, sample in enumerate(corpus.each(job)):
        path = Path(job.folder, f"{number // 1000:03d}", f"{number:06d}.bin")
        if number % 1000 == 0:
            path.parent.mkdir()
        path.write_bytes(sample.tobytes())


def batches(job: Job) -> Batches:
    """Read files with `open` and `read`, which is cheaper than memory mapping at this size."""
    return plain.loader(job, _Files(local(job), job))


class _Files(Dataset[Any]):
    def __init__(self, folder: Path, job: Job) -> None:
        # A numpy array, so that workers do not copy pages by counting references to each path.
        self._paths = np.array([str(path) for path in sorted(folder.rglob("*.bin"))])
        self._dtype = corpus.DTYPE.get(job.kind)

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> Any:
        with open(self._paths[index], "rb", buffering=0) as file:
            body = file.read()
        return body if self._dtype is None else np.frombuffer(body, self._dtype)
