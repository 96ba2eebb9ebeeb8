"""Recognises the headers of token shards, by the tools that write them.

llm.c and modded-nanogpt: 256 int32, the first three are a magic number, a version and the count of tokens.
https://github.com/karpathy/llm.c/blob/master/dev/data/data_common.py
litgpt's PackedDataset: a magic text, u64 version, u8 type and u64 count of tokens.
https://github.com/Lightning-AI/litgpt/blob/3f3189b/lit_gpt/packed_dataset.py
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from cachesvc.core.errors import CorruptData, InvalidInput
from cachesvc.core.model import ObjectVersion

HEAD_BYTES = 24
"""The first bytes of a file, enough to recognise its header."""
_LLMC = struct.Struct("<iii")
_LLMC_BYTES = 1024
_LLMC_TYPES = {20240520: (1, "<u2"), 20240801: (7, "<u4")}
"""Version and type by magic number: GPT-2's tokens, and Llama 3's."""
_LLMC_EVAL = 20240522
_LITGPT = struct.Struct("<7sQBQ")
_LITGPT_MAGIC = b"LITPKDS"
_LITGPT_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f4", 7: "<f8", 8: "<u2"}


@dataclass(frozen=True, slots=True)
class Header:
    """A header of `size_bytes`, followed by `tokens` numbers of `dtype`."""

    tool: str
    size_bytes: int
    dtype: np.dtype[Any]
    tokens: int


def header_of(version: ObjectVersion, head: bytes) -> Header | None:
    """Return the header of a file by its first `HEAD_BYTES`; None where it has no known header.

    Raises InvalidInput for an unknown version or type, and for a file that holds no token stream; CorruptData where the
    file does not end with the last token.
    """
    found = _litgpt(version.uri, head) if head.startswith(_LITGPT_MAGIC) else _llmc(version.uri, head)
    if found is None:
        return None
    size_bytes = found.size_bytes + found.tokens * found.dtype.itemsize
    if found.tokens < 0 or size_bytes != version.size_bytes:
        raise CorruptData(
            f"{version.uri} has {version.size_bytes:,} bytes, and its header ({found.tool}) says {size_bytes:,}: "
            f"{found.tokens:,} tokens of {found.dtype.name}"
        )
    return found


def _llmc(uri: str, head: bytes) -> Header | None:
    magic, version, tokens = _LLMC.unpack(head[: _LLMC.size].ljust(_LLMC.size, b"\0"))
    if len(head) < _LLMC.size and magic in _LLMC_TYPES:
        raise CorruptData(f"{uri} ends inside its header (llm.c)")
    if magic == _LLMC_EVAL:
        raise InvalidInput(
            f"{uri} holds questions and their choices (llm.c's eval format), no stream of tokens"
        )
    if magic not in _LLMC_TYPES:
        return None
    known, dtype = _LLMC_TYPES[magic]
    if version != known:
        raise InvalidInput(
            f"{uri} has a header of llm.c of version {version}, not {known}: {_ANYWAY % _LLMC_BYTES}"
        )
    return Header("llm.c", _LLMC_BYTES, np.dtype(dtype), tokens)


def _litgpt(uri: str, head: bytes) -> Header:
    if len(head) < _LITGPT.size:
        raise CorruptData(f"{uri} ends inside its header (litgpt)")
    _, version, code, tokens = _LITGPT.unpack(head[: _LITGPT.size])
    if version != 1 or code not in _LITGPT_TYPES:
        raise InvalidInput(
            f"{uri} has a header of litgpt of version {version} and type {code}, which is unknown: "
            f"{_ANYWAY % _LITGPT.size}"
        )
    return Header("litgpt", _LITGPT.size, np.dtype(_LITGPT_TYPES[code]), tokens)


_ANYWAY = "header_bytes=%d and dtype= read it as it is"
