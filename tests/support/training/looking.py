"""One rank of a torchrun job in which one rank looks at a batch.

    python -m tests.support.training.looking FILE LOOK RANK WHEN STEPS

LOOK: "next" (`next(iter(loader))`), "peek", or "other" (a loader with shard=False). WHEN: "before" or "after" the first
epoch. Each step has a collective. An epoch is left after STEPS; 0: it is whole. Prints the outcome as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist

from cachesvc.core.errors import CacheError
from loader import DataLoader, open_dataset

EPOCHS = 3
PEER_FAILURE_S = 2.0


def trained(batches: DataLoader[Any], look: str, when: str, steps: int) -> list[list[int]]:
    """Run the epochs; return this rank's samples in each."""
    seen: list[list[int]] = []
    for epoch in range(EPOCHS):
        if epoch == ("before", "after").index(when):
            if look == "peek":
                batches.peek()
            elif look:
                next(iter(batches if look == "next" else DataLoader(batches.dataset, 2, shard=False)))
        seen.append([])
        for batch in islice(batches, steps or None):
            dist.all_reduce(torch.ones(1))
            seen[-1] += batch[:, 0].tolist()
    return seen


def main() -> None:
    path, look, rank, when, steps = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    batches = DataLoader(open_dataset(path, format="records"), 2, shuffle=True, peer_failure_s=PEER_FAILURE_S)
    try:
        said: Any = trained(batches, look if dist.get_rank() == int(rank) else "", when, int(steps))
    except CacheError as error:
        said = [type(error).__name__, str(error)]
    print(json.dumps(said), flush=True)
    sys.stdin.read()
    os._exit(0)  # a normal exit would wait for gloo's threads, and these for other ranks


if __name__ == "__main__":
    main()
