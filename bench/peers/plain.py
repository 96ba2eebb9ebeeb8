"""A torch DataLoader set up as its tuning guide recommends: shuffled, persistent workers, prefetched batches."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from bench.peers import collate
from bench.peers.peer import Job


def loader(job: Job, data: Dataset[Any]) -> DataLoader[Any]:
    """A DataLoader over a map-style dataset whose samples are arrays or bytes."""
    more: dict[str, Any] = {"persistent_workers": True, "prefetch_factor": 4} if job.workers else {}
    torch.set_num_threads(1)  # else torch's stack starts a thread per core, which is slower here
    return DataLoader(
        data,
        job.batch_size,
        shuffle=True,
        num_workers=job.workers,
        collate_fn=collate.collate_of(job),
        **more,
    )
