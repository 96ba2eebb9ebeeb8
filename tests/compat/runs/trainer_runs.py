"""Runs under Hugging Face's Trainer, over a loader of ours and over a loader that Trainer makes from our dataset."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import EvalPrediction, Trainer, TrainerCallback, TrainingArguments

from loader import DataLoader, Dataset
from tests.compat.ledger import BATCH, EPOCHS, STOP, Model, Seen, batch_size, ids, loader_of, save


class Scoring(torch.nn.Module):
    """Model that predicts the number of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()

    def forward(self, rows: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.model(rows), "logits": rows[:, 0]}


class Interrupted(TrainerCallback):
    """Callback that saves and ends the run in mid-epoch."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == STOP:
            control.should_save = control.should_training_stop = True


class Recording(Trainer):
    """Trainer that records its samples. It trains with `own`, a loader of ours, where given."""

    def __init__(self, data: Dataset, folder: Path, own: DataLoader | None, **given: Any) -> None:
        self.own, self.seen = own, list[int]()
        arguments = TrainingArguments(
            str(folder),
            per_device_train_batch_size=batch_size(),
            per_device_eval_batch_size=BATCH,
            num_train_epochs=EPOCHS,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            **given,
        )
        super().__init__(Scoring(), arguments, train_dataset=data, compute_metrics=counted)

    def get_train_dataloader(self) -> Any:
        return super().get_train_dataloader() if self.own is None else self.own

    def training_step(self, model: Any, inputs: Any, *rest: Any) -> torch.Tensor:
        self.seen += ids(inputs["rows"])
        return super().training_step(model, inputs, *rest)


def counted(found: EvalPrediction) -> dict[str, float]:
    """Numbers of predictions, and of distinct samples among them."""
    assert (found.predictions == found.label_ids).all()
    return {"predictions": len(found.predictions), "samples": len(np.unique(found.predictions))}


def first(data: Dataset, folder: Path) -> Seen:
    """Run uninterrupted, and until an interruption in mid-epoch."""
    seen: Seen = {}
    for name in ("override", "train_dataset"):
        own = [loader_of(data) if name == "override" else None for _ in range(2)]
        whole = Recording(data, folder / f"whole {name}", own[0])
        whole.train()
        begun = Recording(data, folder / name, own[1])
        begun.add_callback(Interrupted())
        begun.train()
        if own[1] is not None:
            save(folder / "trainer.json", own[1].state_dict())
        seen |= {f"Trainer, {name}": whole.seen, f"Trainer, {name}, begun": begun.seen}
    return seen


def again(data: Dataset, folder: Path) -> Seen:
    """Resume the interrupted runs in each way that Trainer offers."""
    seen = {}
    for ignored in (False, True):
        ways: dict[str, DataLoader | None] = {
            "override, with the state": loader_of(data),
            "override, without the state": loader_of(data),
            "train_dataset": None,
        }
        for name, own in ways.items():
            if own is not None and "with the state" in name:
                own.load_state_dict(json.loads((folder / "trainer.json").read_text()))
            run = Recording(data, folder / "again", own, ignore_data_skip=ignored)
            saved = folder / ("train_dataset" if own is None else "override") / f"checkpoint-{STOP}"
            run.train(resume_from_checkpoint=str(saved))
            seen[f"Trainer, {name}, ignore_data_skip={ignored}"] = run.seen
    return seen


def evaluated(data: Dataset, folder: Path) -> dict[str, float]:
    """Metrics of `evaluate`, which count its samples."""
    return Recording(data, folder, None).evaluate(data)
