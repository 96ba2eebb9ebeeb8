"""Runs under Lightning's Trainer and Fabric, with and without their own sampler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytorch_lightning as lightning
import torch
from lightning_fabric import Fabric
from pytorch_lightning.callbacks import ModelCheckpoint

from loader import DataLoader, Dataset
from tests.compat.ledger import BATCH, EPOCHS, STOP, Model, Seen, ids, loader_of, world_size

THEIR_SAMPLER = {"with their sampler": True, "without their sampler": False}


class Training(lightning.LightningModule):
    """Module that records its samples."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.seen = Model(), list[int]()

    def training_step(self, rows: torch.Tensor, _: int) -> torch.Tensor:
        self.seen += ids(rows)
        return self.model(rows)

    def predict_step(self, rows: torch.Tensor, _: int) -> None:
        self.seen += ids(rows)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)


def trainer(folder: Path, theirs: bool, **given: Any) -> lightning.Trainer:
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return lightning.Trainer(
        accelerator="cpu",
        devices=world_size(),
        strategy="ddp",
        use_distributed_sampler=theirs,
        default_root_dir=str(folder),
        **quiet,
        **given,
    )


def trained(data: Dataset, folder: Path, theirs: bool, checkpoint: str | None) -> list[int]:
    model = Training()
    saved = ModelCheckpoint(folder, "{step}", every_n_train_steps=STOP, save_top_k=-1)
    run = trainer(folder, theirs, max_epochs=EPOCHS, callbacks=[saved])
    run.fit(model, loader_of(data), ckpt_path=checkpoint, weights_only=False)
    return model.seen


def predicted(data: Dataset, folder: Path, theirs: bool) -> list[int]:
    model = Training()
    trainer(folder, theirs).predict(model, DataLoader(data, BATCH), return_predictions=False)
    return model.seen


def first(data: Dataset, folder: Path) -> Seen:
    """Run uninterrupted, and until an interruption in mid-epoch."""
    seen = {}
    for name, theirs in THEIR_SAMPLER.items():
        seen[f"Lightning, {name}"] = trained(data, folder / name, theirs, None)
        seen[f"predict, {name}"] = predicted(data, folder, theirs)
        saved = folder / f"fabric {name}.ckpt"
        seen[f"Fabric, {name}"] = fabric(data, theirs, False, None, saved)
        seen[f"Fabric, {name}, begun"] = fabric(data, theirs, False, STOP, saved)
    return seen


def again(data: Dataset, folder: Path) -> Seen:
    """Resume the interrupted runs."""
    seen = {}
    for name, theirs in THEIR_SAMPLER.items():
        checkpoint = str(folder / name / f"step={STOP}.ckpt")
        seen[f"Lightning, {name}"] = trained(data, folder / "again", theirs, checkpoint)
        seen[f"Fabric, {name}"] = fabric(data, theirs, True, None, folder / f"fabric {name}.ckpt")
    return seen


def fabric(data: Dataset, theirs: bool, resume: bool, stop: int | None, saved: Path) -> list[int]:
    run = Fabric(accelerator="cpu", devices=world_size(), strategy="ddp")
    run.launch()
    module = Model()
    model, optimizer = run.setup(module, torch.optim.SGD(module.parameters(), 0.01))
    own = loader_of(data)
    batches: Any = run.setup_dataloaders(own, use_distributed_sampler=theirs)
    if resume:
        run.load(saved, {"model": model, "loader": batches})
    seen, steps = list[int](), 0
    for _ in range(own.epoch, EPOCHS):
        for rows in batches:
            seen += ids(rows)
            run.backward(model(rows))
            optimizer.step()
            steps += 1
            if steps == stop:
                run.save(saved, {"model": model, "loader": batches})
                return seen
    return seen
