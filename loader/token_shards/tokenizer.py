"""A tokenizer of Hugging Face's `tokenizers`, and the text of a row."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from cachesvc.core.errors import InvalidInput, NotFound, install

TEXT = "text"
"""The field of a row that is tokenised, unless another one is named."""
_HUB_NAME = re.compile(r"\w[\w.-]*(/[\w.-]+)?")
_NARROW = 1 << 16
"""The number of tokens that uint16 holds. More are stored as int32, since Megatron has no uint32."""


class Tokenizer:
    """A tokenizer, from a file or from the hub."""

    def __init__(self, name: str, eos: str) -> None:
        """`name`: a tokenizer.json, or a name at the hub. `eos`: the token at the end of each document, "" for none.
        Raises InvalidInput, NotFound."""
        self._inner = _load(name)
        self._inner.no_truncation()
        self._inner.no_padding()
        self._end: list[int] = [] if not eos else [self._inner.token_to_id(eos)]
        if self._end == [None]:
            raise InvalidInput(f"{name} has no token {eos!r}; give --eos one that it has")
        size = max(self._inner.get_vocab().values(), default=0) + 1
        self.dtype: np.dtype[Any] = np.dtype("<u2" if size <= _NARROW else "<i4")

    @property
    def digest(self) -> str:
        """The digest of what decides the tokens of a text."""
        content = f"{self._inner.to_str()} {self._end}"
        return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()

    def documents(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text, with those that the tokenizer's own template adds. An empty text has none."""
        found = self._inner.encode_batch(list(texts))
        return [each.ids + self._end if text else [] for each, text in zip(found, texts, strict=True)]


def _load(name: str) -> Any:
    try:
        import tokenizers
    except ImportError:
        raise InvalidInput(f"the package tokenizers is missing: {install('tokenize')}") from None
    is_file = os.path.exists(name)
    if not is_file and (name.endswith(".json") or not _HUB_NAME.fullmatch(name)):
        raise NotFound(
            f"{name} does not exist; give a tokenizer.json, or a name at Hugging Face's hub (OWNER/NAME)"
        )
    try:
        return tokenizers.Tokenizer.from_file(name) if is_file else tokenizers.Tokenizer.from_pretrained(name)
    except Exception as error:
        if not is_file:
            raise NotFound(f"{name} is no file, and no tokenizer at Hugging Face's hub: {error}") from error
        raise InvalidInput(f"{name} is no tokenizer.json: {error}") from error


def text_of(sample: Any, where: str) -> str:
    """Return the text of a row, or of its field "text". None counts as empty. Raises InvalidInput for other rows;
    `where` names the row in the error."""
    found = sample.get(TEXT, ...) if isinstance(sample, dict) else sample
    if found is None:
        return ""
    if isinstance(found, str):
        return found
    if found is ...:
        raise InvalidInput(f"{where} has the fields {', '.join(map(str, sample))}: name one by --field")
    raise InvalidInput(f"{where} is {type(found).__name__} and no text: name a field of text by --field")
