"""One rank of a job for the tests: python -m tests.support.training.rank FOLDER ROLE, with torchrun's variables.

Each rank reads one file of FOLDER per step. Before the steps begin, rank 1 deletes its second file. ROLE: the work in a
step, "alone" (no collective) or "together" (an all_reduce with all ranks).
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cachesvc.core.errors import CacheError
from loader import DataLoader, open_dataset

PEER_FAILURE_S = 1.5
PER_FILE = 4
THREADS_END_S = 30.0


def say(**what: Any) -> None:
    """Print one line of JSON."""
    print(json.dumps(what), flush=True)


def watches() -> int:
    """Number of threads that listen for other ranks' failures."""
    return sum(thread.name == "cachesvc-peers" for thread in threading.enumerate())


def whole_epoch(dataset: Any) -> int:
    """Read one epoch without faults; print its steps, and the watching threads left after it."""
    steps = sum(1 for _ in DataLoader(dataset, batch_size=PER_FILE))
    deadline = time.monotonic() + THREADS_END_S
    while watches() and time.monotonic() < deadline:
        time.sleep(0.05)  # a watch ends by itself when those of all ranks have ended
    say(steps=steps, watches=watches())
    return steps


def train(batches: DataLoader, role: str) -> None:
    """Run steps until an error."""
    for _ in batches:
        if role == "together":
            dist.all_reduce(torch.ones(1))
        else:
            time.sleep(0.02)  # the work of a step


def main() -> int:
    """Train until an error; return its code once stdin ends, since an early end would free ranks that wait."""
    folder, role = Path(sys.argv[1]), sys.argv[2]
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    dataset = open_dataset(folder, format="records")
    whole_epoch(dataset)
    dataset.close()
    dist.barrier()
    if rank == 1:
        (folder / f"{world + 1:02d}.npy").unlink()
    dist.barrier()
    batches = DataLoader(dataset, batch_size=PER_FILE, epochs=None, peer_failure_s=PEER_FAILURE_S)
    started = time.monotonic()
    try:
        train(batches, role)
    except CacheError as error:
        cause = getattr(error, "cause", None)
        say(
            error=type(error).__name__,
            message=str(error),
            cause=type(cause).__name__,
            after_s=time.monotonic() - started,
        )
        sys.stdin.read()
        os._exit(error.code)  # a normal exit would wait for gloo's threads, and these for other ranks
    return 0


if __name__ == "__main__":
    sys.exit(main())
