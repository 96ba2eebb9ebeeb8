"""A torch DataLoader as its tuning guide recommends it: shuffled, persistent workers, batches prefetched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from bench.peers import collate
from bench.peers.peer import Batches, Job, replayed


def loader(job: Job, data: Dataset[Any]) -> DataLoader[Any]:
    """Over a map-style dataset whose samples are arrays or bytes."""
    more: dict[str, Any] = {"persistent_workers": True, "prefetch_factor": 4} if job.workers else {}
    torch.set_num_threads(1)  # torch's stack would start a thread a core, which costs more than it gains here
    return DataLoader(
        data, job.batch_size, shuffle=True, num_workers=job.workers, collate_fn=collate.chosen(job), **more
    )


def halfway(job: Job, batches: Callable[[Job], Batches]) -> Callable[[], Iterator[Any]]:
    """A plain DataLoader has no state: half an epoch is read again."""
    return replayed(lambda: batches(job), job.samples // job.batch_size // 2)
