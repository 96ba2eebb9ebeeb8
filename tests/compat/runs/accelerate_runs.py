"""Runs under Accelerate: a prepared loader in checkpoints, and `skip_first_batches`."""

from __future__ import annotations

from pathlib import Path

import torch
from accelerate import Accelerator

from loader import Dataset
from tests.compat.ledger import EPOCHS, STOP, Model, Seen, ids, loader_of


class Run:
    """A training script of one process."""

    def __init__(self, data: Dataset) -> None:
        self.accelerator = Accelerator(cpu=True)
        module = Model()
        self.model, self.optimizer, self.batches = self.accelerator.prepare(
            module, torch.optim.SGD(module.parameters(), 0.01), loader_of(data)
        )
        self.seen: list[int] = []

    def step(self, rows: torch.Tensor) -> None:
        self.seen += ids(rows)
        self.accelerator.backward(self.model(rows))
        self.optimizer.step()


def first(data: Dataset, folder: Path) -> Seen:
    """Run uninterrupted, and until an interruption in mid-epoch."""
    whole, begun = Run(data), Run(data)
    for _ in range(EPOCHS):
        for rows in whole.batches:
            whole.step(rows)
    steps = 0
    for _ in range(EPOCHS):
        for rows in begun.batches:
            begun.step(rows)
            steps += 1
            if steps == STOP:
                begun.accelerator.save_state(str(folder / "accelerate"))
                return {"Accelerate": whole.seen, "Accelerate, begun": begun.seen}
    raise AssertionError


def again(data: Dataset, folder: Path) -> Seen:
    """Resume the interrupted run in three ways."""
    prepared = Run(data)
    prepared.accelerator.load_state(str(folder / "accelerate"))
    for _ in range(prepared.batches.epoch, EPOCHS):
        for rows in prepared.batches:
            prepared.step(rows)
    seen = {"Accelerate, prepare": prepared.seen}
    for loaded in (True, False):
        skipped = Run(data)
        if loaded:
            skipped.accelerator.load_state(str(folder / "accelerate"))
        epoch, done = divmod(STOP, len(skipped.batches))
        for number in range(epoch, EPOCHS):
            skipped.batches.set_epoch(number)
            rest = skipped.batches
            if number == epoch:
                rest = skipped.accelerator.skip_first_batches(skipped.batches, done)
            for rows in rest:
                skipped.step(rows)
        seen[f"Accelerate, skip_first_batches, {'with' if loaded else 'without'} the state"] = skipped.seen
    return seen
