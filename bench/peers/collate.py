"""One collation for every peer that accepts one, so that the loaders are compared and not their collation.

It is the fastest that we know: numpy stacks fixed samples (torch's own stack is slower), and uneven samples are joined
to one flat tensor, which is faster than padding. Images are decoded here, because collation runs in the workers.
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
    """Bytes of any size -> uint8[sum of sizes], and int64[n + 1] bounds of the samples in it."""
    values = torch.frombuffer(bytearray().join(samples), dtype=torch.uint8)
    return values, torch.tensor([0, *itertools.accumulate(map(len, samples))])


def decoded(samples: Sequence[bytes]) -> torch.Tensor:
    """JPEGs -> uint8[n, 224, 224, 3]."""
    return stacked([pictures.decoded(one) for one in samples])


def collate_of(job: Job) -> Callable[[list[Any]], Any]:
    """The collation of this job's batches."""
    if job.kind in corpus.DTYPE:
        return default_collate if job.peer == UNTUNED else stacked
    if job.kind == "images":
        return decoded
    return joined
