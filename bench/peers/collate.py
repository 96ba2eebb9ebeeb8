"""The same collation for every peer that lets us choose one, so that loaders are compared and not their glue.

The fastest that we know: fixed samples are stacked by numpy (torch's own stack is slower); uneven ones
are joined to one flat tensor, which is quicker than padding them, by numpy or torch. Images are decoded here: it is
run where samples are made.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from bench.peers import corpus, pictures
from bench.peers.peer import UNTUNED, Job


def stacked(samples: Sequence[np.ndarray[Any, Any]]) -> torch.Tensor:
    """Samples of one shape -> [n, ...]."""
    return torch.from_numpy(np.stack(samples))


def joined(samples: Sequence[bytes]) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes of any size -> uint8[sum of sizes], where each begins and the last ends."""
    values = torch.frombuffer(bytearray().join(samples), dtype=torch.uint8)
    return values, torch.tensor([0, *itertools.accumulate(map(len, samples))])


def developed(samples: Sequence[bytes]) -> torch.Tensor:
    """JPEGs -> uint8[n, 224, 224, 3]."""
    return stacked([pictures.decoded(one) for one in samples])


def chosen(job: Job) -> Callable[[Sequence[Any]], Any]:
    """What this job's batches are made by."""
    if job.kind in corpus.DTYPE:
        return default_collate if job.peer == UNTUNED else stacked
    if job.kind == "images":
        return developed
    return joined
