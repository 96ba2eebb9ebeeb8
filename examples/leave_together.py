"""A training loop that may be preempted: on SIGTERM to any rank, all ranks leave after the same step, with a saved state.

    torchrun --nproc-per-node 8 leave_together.py s3://bucket/text/ checkpoints/

Start it again, on any number of ranks that divides the global batch, and it goes on where it left. Each rank appends the
samples of its batches to a ledger, `checkpoints/ledger-RUN-RANK.jsonl`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist

from cachesvc.torch import DataLoader, open_dataset

GLOBAL_BATCH = 8


def main() -> None:
    """Train to the end, or to the step at which a rank was told to leave."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("data")
    arguments.add_argument("folder", type=Path)
    given = arguments.parse_args()
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    state_file = given.folder / "loader.json"
    run = len([*given.folder.glob("ledger-*-0.jsonl")])
    batches = DataLoader(
        open_dataset(given.data, format="records", record_bytes=64),
        GLOBAL_BATCH // world,
        shuffle=True,
        seed=1,
    )
    if state_file.exists():
        batches.load_state_dict(json.loads(state_file.read_text()))
    dist.barrier()  # all have read the state and counted the ledgers
    with open(given.folder / f"ledger-{run}-{rank}.jsonl", "w", buffering=1) as ledger:
        for _ in batches:
            ...  # forward, backward, step
            ledger.write(f"{json.dumps(batches.indices[: batches.valid].tolist())}\n")
            leave = torch.tensor([len(told)])  # with the loss, in an all-reduce that is there anyway
            dist.all_reduce(leave, dist.ReduceOp.MAX)
            if leave:
                break
    batches.digest()  # so that the state has it
    if rank == 0:
        state_file.with_suffix(".new").write_text(json.dumps(batches.state_dict()))
        os.replace(state_file.with_suffix(".new"), state_file)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
