"""The scripts of docs/trainers.md run, on one rank, over pictures and tokens on a disk in place of those in a bucket."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from testbed import ROOT
from tests.compat.launch import ran, torchrun

PAGE = (ROOT / "docs" / "trainers.md").read_text()
SECTIONS = [part.partition("\n") for part in PAGE.split("\n## ")[1:]]
SCRIPTS = {name: text.partition("```python\n")[2].partition("```\n")[0] for name, _, text in SECTIONS}
NEEDED = {
    "DDP and FSDP2": "torch",
    "Lightning": "pytorch_lightning",
    "Accelerate": "accelerate",
    "Hugging Face Trainer": "transformers",
    "SFTTrainer": "trl",
    "DeepSpeed": "deepspeed",
    "Ray Train": "ray",
    "torchtitan": "torchtitan",
}
"""The package of each section's script."""
MODEL = "HuggingFaceTB/SmolLM2-135M"


def save_model(folder: Path) -> None:
    """Write a small model and its tokenizer as a script would fetch them from the hub."""
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    small = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = LlamaConfig(vocab_size=256, eos_token_id=2, pad_token_id=2, **small)
    LlamaForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({str(n): n for n in range(256)}, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="2", pad_token="2").save_pretrained(folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Pictures of two classes, and tokens."""
    for kind in ("cat", "dog"):
        (tmp_path / "pets" / kind).mkdir(parents=True)
        for number in range(40):
            Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / "pets" / kind / f"{number}.png")
    (tmp_path / "tokens").mkdir()
    np.arange(16 * 512, dtype="<u2").__mod__(256).astype("<u2").tofile(tmp_path / "tokens" / "a.bin")
    return tmp_path


def test_every_section_has_a_script() -> None:
    assert list(SCRIPTS) == list(NEEDED)
    assert PAGE.count("```python") == len(SCRIPTS) + 1  # pets.py


@pytest.mark.parametrize("name", NEEDED)
def test_the_script_runs_and_goes_on_from_its_checkpoint(name: str, folder: Path) -> None:
    if importlib.util.find_spec(NEEDED[name]) is None:
        pytest.skip(f"no {NEEDED[name]} here: `make compat` installs it")
    if MODEL in SCRIPTS[name]:
        save_model(folder / "model")
    pets = PAGE.partition("```python\n")[2].partition("```\n")[0]
    changes = {
        "s3://bucket": str(folder),
        MODEL: str(folder / "model"),
        "num_train_epochs=1,": "num_train_epochs=1, use_cpu=True, bf16=False,",  # SFTConfig wants a GPU
    }
    for file, code in (("pets.py", pets), ("train.py", SCRIPTS[name])):
        for before, after in changes.items():
            code = code.replace(before, after)
        (folder / file).write_text(code)
    command = torchrun(1) if name != "Ray Train" else []
    settings = {"PYTHONPATH": f"{ROOT}:{folder}", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    for _ in range(2):  # the second run begins with the first one's checkpoint
        ran(*command, "train.py", folder=folder, **settings)
