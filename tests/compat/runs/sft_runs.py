"""Runs under TRL's SFTTrainer, over sequences of tokens that are ready to train on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from loader import Dataset, open_dataset
from tests.compat.ledger import EPOCHS, STOP, batch_size, loader_of
from tests.compat.runs.trainer_runs import Interrupted

VOCABULARY = 256
SMALL: dict[str, int] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}


class Recording(SFTTrainer):
    """SFTTrainer over our loader. It records its samples: each sequence begins with its number."""

    def __init__(self, data: Dataset, folder: Path) -> None:
        self.own, self.seen = loader_of(data), list[int]()
        words = {str(number): number for number in range(VOCABULARY)}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="0"))
        super().__init__(
            LlamaForCausalLM(LlamaConfig(**SMALL)),
            SFTConfig(
                str(folder),
                per_device_train_batch_size=batch_size(),
                num_train_epochs=EPOCHS,
                dataset_kwargs={"skip_prepare_dataset": True},
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                use_cpu=True,
                bf16=False,
            ),
            train_dataset=datasets.Dataset.from_dict({"input_ids": [[0]]}),  # it takes no other class
            processing_class=PreTrainedTokenizerFast(
                tokenizer_object=tokenizer, eos_token="2", pad_token="2"
            ),
        )

    def get_train_dataloader(self) -> Any:
        return self.own

    def training_step(self, model: Any, inputs: Any, *rest: Any) -> torch.Tensor:
        self.seen += inputs["input_ids"][:, 0].tolist()
        return super().training_step(model, inputs, *rest)


def sequence(row: torch.Tensor) -> dict[str, torch.Tensor]:
    """A sequence of tokens, all of them the number of the record, with the mask that SFTTrainer asks for."""
    tokens = row.repeat(4)
    return {"input_ids": tokens, "labels": tokens, "attention_mask": torch.ones_like(tokens)}


def run(name: str, data: Path, folder: Path, resume: bool, stop: int) -> list[int]:
    """Train until the end, or save after STOP steps and end. Returns this rank's samples."""
    trainer = Recording(open_dataset(data, transform=sequence), folder / name)
    if stop:
        trainer.add_callback(Interrupted())
    trainer.train(resume_from_checkpoint=str(folder / name / f"checkpoint-{STOP}") if resume else None)
    return trainer.seen
