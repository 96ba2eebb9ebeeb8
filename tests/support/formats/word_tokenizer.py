"""Writes a tokenizer of Hugging Face's `tokenizers` that knows a few words."""

from __future__ import annotations

from pathlib import Path

import tokenizers

WORDS = {"[UNK]": 0, "<end>": 1, "a": 2, "cat": 3, "runs": 4}


def word_tokenizer(path: Path, **other: int) -> Path:
    """Write a tokenizer.json whose tokens are `WORDS`, and `other` numbers for some, and return its path. It asks for
    truncation, as files of fine-tuned models do."""
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(WORDS | other, "[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.enable_truncation(2)
    made.save(str(path))
    return path
