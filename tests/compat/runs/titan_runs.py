"""Runs under torchtitan's interface of data loaders and its checkpoint manager. The loop is that of its trainer, which
does not start without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torchtitan.components.checkpointer.dcp import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader

from loader import DataLoader, open_dataset
from tests.compat.ledger import EPOCHS, Model, batch_size, ids


class Batches(BaseDataLoader):
    """The recipe of docs/trainers.md, over records in place of tokens, and for `EPOCHS` epochs."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        num_workers: int = 0

    def __init__(
        self, config: Config, *, dp_world_size: int, dp_rank: int, local_batch_size: int, **_: Any
    ) -> None:
        self.batches = DataLoader(
            open_dataset(config.dataset_path),
            local_batch_size,
            shuffle=True,
            seed=7,
            num_workers=config.num_workers,
            rank=dp_rank,
            world_size=dp_world_size,
        )

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        for _ in range(self.batches.epoch, EPOCHS):
            for rows in self.batches:
                yield {"input": rows}, rows

    def state_dict(self) -> dict[str, Any]:
        return self.batches.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.batches.load_state_dict(state_dict)


def run(kind: str, data: Path, folder: Path, resume: bool, stop: int) -> list[int]:
    """Train until the end, or save after `stop` steps and end. Returns this rank's samples."""
    batches = Batches.Config(dataset_path=str(data)).build(
        dp_world_size=torch.distributed.get_world_size(),
        dp_rank=torch.distributed.get_rank(),
        tokenizer=None,
        seq_len=1,
        local_batch_size=batch_size(),
        snapshot_every_n_steps=1,
    )
    checkpoints = CheckpointManager.Config(enable=True, interval=max(1, stop)).build(
        dataloader=batches,
        model_parts=[Model()],
        optimizers={},
        lr_schedulers={},
        states={},
        sd_adapter=None,
        base_folder=str(folder / kind),
    )
    if resume:
        assert checkpoints.load()
    seen = list[int]()
    for steps, (inputs, _) in enumerate(batches, 1):
        seen += ids(inputs["input"])
        if steps == stop:
            checkpoints.save(steps)
            break
    checkpoints.close()
    return seen
