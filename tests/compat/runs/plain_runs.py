"""Runs without a trainer: a plain loop under DistributedDataParallel and FSDP2, with torch's distributed checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from loader import open_dataset
from tests.compat.ledger import EPOCHS, Model, ids, loader_of

KINDS: dict[str, Callable[..., torch.nn.Module]] = {
    "DDP": DistributedDataParallel,
    "FSDP2": cast(Callable[..., torch.nn.Module], fully_shard),
}


def run(kind: str, data: Path, folder: Path, resume: bool, stop: int) -> list[int]:
    """Train until the end, or save after `stop` steps and end. Returns this rank's samples."""
    module = Model()
    model = KINDS[kind](module)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    batches = loader_of(open_dataset(data))
    if resume:
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "loader": batches}
        dcp.load(state, checkpoint_id=folder / kind)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    seen, steps = list[int](), 0
    for _ in range(batches.epoch, EPOCHS):
        for rows in batches:
            seen += ids(rows)
            model(rows).backward()
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            if steps == stop:
                weights, moments = get_state_dict(model, optimizer)
                dcp.save(
                    {"model": weights, "optimizer": moments, "loader": batches}, checkpoint_id=folder / kind
                )
                return seen
    return seen
