"""Runs under DeepSpeed, with ZeRO and its own checkpoints."""

from __future__ import annotations

from pathlib import Path

import deepspeed

from loader import open_dataset
from tests.compat.ledger import EPOCHS, Model, batch_size, ids, loader_of

STAGES = {"DeepSpeed, ZeRO 1": 1, "DeepSpeed, ZeRO 2": 2}


def run(name: str, data: Path, folder: Path, resume: bool, stop: int) -> list[int]:
    """Train until the end, or save after `stop` steps and end. Returns this rank's samples."""
    model = Model()
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=list(model.parameters()),
        config={
            "train_micro_batch_size_per_gpu": batch_size(),
            "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
            "zero_optimization": {"stage": STAGES[name]},
        },
        dist_init_required=False,
    )
    batches = loader_of(open_dataset(data))
    if resume:
        # ZeRO's parts of the optimizer belong to one number of ranks; weights and client state do not.
        _, client = engine.load_checkpoint(folder / name, load_module_only=batch_size() != 5)
        batches.load_state_dict(client["loader"])
    seen, steps = list[int](), 0
    for _ in range(batches.epoch, EPOCHS):
        for rows in batches:
            seen += ids(rows)
            engine.backward(engine(rows))
            engine.step()
            steps += 1
            if steps == stop:
                engine.save_checkpoint(folder / name, client_state={"loader": batches.state_dict()})
                return seen
    return seen
