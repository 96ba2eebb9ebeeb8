"""A run of Hugging Face's Trainer that ends within its third epoch: `python -m tests.compat.runs.trainer_epochs ROWS
FOLDER WAY WORKERS`, one rank of torchrun's.

WAY: "override", a loader of ours, or "train_dataset", our dataset in a loader of Trainer's with WORKERS persistent
workers. Writes to FOLDER/RANK.json the number of each sample and what its transform drew, by step.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Trainer, TrainingArguments

from loader import DataLoader, open_dataset
from tests.compat.runs.trainer_runs import Scoring

BATCH = 4


def drawing(record: torch.Tensor, rng: np.random.Generator) -> dict[str, Any]:
    return {"rows": torch.tensor([float(record[0]), rng.random()], dtype=torch.float64), "labels": record[0]}


class Recording(Trainer):
    """Trainer that records its samples. It trains with `own`, a loader of ours, where given."""

    own: DataLoader[Any] | None = None
    seen: list[list[list[float]]]

    def get_train_dataloader(self) -> Any:
        return super().get_train_dataloader() if self.own is None else self.own

    def training_step(self, model: Any, inputs: Any, *rest: Any) -> torch.Tensor:
        self.seen.append(inputs["rows"].tolist())
        return super().training_step(model, inputs, *rest)


def main(rows: str, folder: Path, way: str, workers: int) -> None:
    torch.set_num_threads(1)
    data, world = open_dataset(rows, transform=drawing), int(os.environ["WORLD_SIZE"])
    arguments = TrainingArguments(
        str(folder),
        per_device_train_batch_size=BATCH,
        max_steps=2 * len(data) // (BATCH * world) + 1,
        dataloader_num_workers=workers,
        dataloader_persistent_workers=workers > 0,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    run = Recording(Scoring(), arguments, train_dataset=data)
    run.seen = []
    if way == "override":
        run.own = DataLoader(data, BATCH, shuffle=True)
        if os.environ["RANK"] == "0":
            run.own.peek()
    run.train()
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(run.seen))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
