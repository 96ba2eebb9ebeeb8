"""A training script under Lightning, two ranks.

    python -m tests.compat.runs.lightning_job DATA OUT SAMPLER CHECKPOINT LIMIT

Writes to OUT-RANK.json the samples that this rank saw. SAMPLER: "lightning" where Lightning may add its own sampler.
CHECKPOINT: the state to resume, "" for none. LIMIT: batches of an epoch, "" for all.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytorch_lightning as lightning
import torch
from pytorch_lightning.callbacks import ModelCheckpoint

from loader import DataLoader, open_dataset

EVERY = 5


class Model(lightning.LightningModule):
    """Model that learns nothing and records its samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[int] = []

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        self.seen += batch[:, 0].tolist()
        return self.layer(batch[:, :1].float()).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)


def main(data: str, out: str, sampler: str, checkpoint: str, limit: str) -> None:
    batches = DataLoader(open_dataset(data), 5, shuffle=True, drop_last=True)
    saved = ModelCheckpoint(dirpath=f"{out}-saved", every_n_train_steps=EVERY, save_top_k=-1)
    at_end = ModelCheckpoint(f"{out}-saved", "end-{epoch}", every_n_epochs=1, save_top_k=-1)
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    model = Model()
    lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=2,
        use_distributed_sampler=sampler == "lightning",
        callbacks=[saved, at_end],
        limit_train_batches=int(limit) if limit else None,
        default_root_dir=str(Path(out).parent),
        **quiet,
    ).fit(model, batches, ckpt_path=checkpoint or None, weights_only=False)
    Path(f"{out}-{model.global_rank}.json").write_text(json.dumps(model.seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
