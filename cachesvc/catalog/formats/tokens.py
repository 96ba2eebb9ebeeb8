"""Compiles token files to sequences of `seq_len` (+ `overlap`) tokens.

The files are `.bin`, raw or with a known header, `.npy`, and Megatron's `.bin` with `.idx`. The tokens of a file are one
stream: sample i is tokens [i * seq_len, (i + 1) * seq_len + overlap). Extents are cut every `extent_bytes` of a file for
any `seq_len`, so that datasets of different lengths share them; a sequence may span two extents.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from cachesvc.catalog.columns import Ints
from cachesvc.catalog.compiler import Draft, Inputs, ListedObject
from cachesvc.catalog.formats.records import (
    Cut,
    Payload,
    check_payloads,
    lay_out,
    npy_payload,
    parse_dtype,
    raw_payload,
    read_payloads,
)
from cachesvc.core.errors import CorruptData, InvalidInput
from cachesvc.core.model import PAGE_BYTES

_MEGATRON = struct.Struct("<9sQBQQ")
_MAGIC = b"MMIDIDX\x00\x00"
_MEGATRON_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}


def select(entries: Sequence[ListedObject]) -> list[ListedObject]:
    """Choose the objects that hold tokens, and their Megatron indices."""
    return [entry for entry in entries if entry.extension in ("bin", "npy", "idx")]


def compile_tokens(inputs: Inputs) -> Draft:
    """Compile token files. Raises InvalidInput without `seq_len` or a dtype, CorruptData for a broken index."""
    options = inputs.options
    if options.seq_len <= 0 or options.overlap < 0:
        raise InvalidInput(
            f"{inputs.uri}: token files need seq_len (--seq-len), the tokens of a sample, and overlap >= 0"
        )
    indices = {_stem(entry): at for at, entry in enumerate(inputs.entries) if entry.extension == "idx"}
    shards = [at for at, entry in enumerate(inputs.entries) if entry.extension != "idx"]
    index_of = {at: indices.pop(_stem(inputs.entries[at]), None) for at in shards}
    payloads, documents, stream = [], [], 0
    for payload, bounds in read_payloads(inputs, lambda at: _shard(inputs, at, index_of[at]), shards):
        if bounds is not None:
            documents.append(bounds + stream)
        payloads.append(payload)
        stream += payload.length // payload.dtype.itemsize
    _check(inputs, payloads, [inputs.entries[at].object.uri for at in indices.values()])
    width = payloads[0].dtype.itemsize
    tokens = options.seq_len + options.overlap
    extent_bytes = max(PAGE_BYTES, options.extent_bytes // PAGE_BYTES * PAGE_BYTES)
    cut = Cut(tokens * width, options.seq_len * width, extent_bytes, True)
    draft = lay_out(inputs, payloads, cut, "tokens", (tokens,))
    if documents:
        draft.columns["documents"] = np.concatenate(documents)
    return draft


def _stem(entry: ListedObject) -> str:
    return entry.object.uri.rpartition(".")[0]


def _shard(inputs: Inputs, at: int, index: int | None) -> tuple[Payload, Ints | None]:
    """Return the tokens of a file, and its document bounds where it has an index."""
    return (_plain(inputs, at), None) if index is None else _megatron(inputs, at, index)


def _check(inputs: Inputs, payloads: Sequence[Payload], unpaired: Sequence[str]) -> None:
    if unpaired or not payloads:
        raise InvalidInput(
            f"{unpaired[0] if unpaired else inputs.uri}: an .idx file needs its .bin beside it"
        )
    check_payloads(inputs, payloads)
    dtypes = sorted({payload.dtype.str for payload in payloads})
    if len(dtypes) > 1:
        raise InvalidInput(f"{inputs.uri}: token files of different types: {', '.join(dtypes)}")
    stated = inputs.options.dtype
    if stated and parse_dtype(stated) != payloads[0].dtype:
        raise InvalidInput(f"{inputs.uri} holds {dtypes[0]}, not dtype {stated}")


def _plain(inputs: Inputs, at: int) -> Payload:
    entry, options = inputs.entries[at], inputs.options
    stated = parse_dtype(options.dtype) if options.dtype else None
    if entry.extension == "npy":
        found = npy_payload(inputs, at)
        if stated is not None and stated != found.dtype:
            raise InvalidInput(f"{entry.object.uri} holds {found.dtype.str}, not dtype {options.dtype}")
        return found
    if stated is not None and stated.shape:
        raise InvalidInput(f"dtype {options.dtype!r} of tokens cannot have a shape")
    found = raw_payload(inputs, at, stated)
    return replace(found, length=found.length // found.dtype.itemsize * found.dtype.itemsize)


def _megatron(inputs: Inputs, at: int, index: int) -> tuple[Payload, Ints]:
    """Return a `.bin` by its `.idx`, and the bounds of its documents, in tokens of this file."""
    tokens, idx = inputs.entries[at].object, inputs.entries[index].object
    raw = inputs.fetch(idx, 0, min(idx.size_bytes, _MEGATRON.size))
    if len(raw) < _MEGATRON.size:
        raise CorruptData(f"{idx.uri} is shorter than a Megatron header")
    magic, version, code, sequences, documents = _MEGATRON.unpack(raw)
    if magic != _MAGIC or version != 1 or code not in _MEGATRON_DTYPES:
        raise CorruptData(f"{idx.uri} is no Megatron index: magic {magic!r}, version {version}, type {code}")
    if idx.size_bytes < _MEGATRON.size + 12 * sequences + 8 * documents:
        raise CorruptData(f"{idx.uri} is truncated: {sequences} sequences and {documents} documents expected")
    dtype: np.dtype[Any] = np.dtype(_MEGATRON_DTYPES[code])
    lengths = np.frombuffer(inputs.fetch(idx, _MEGATRON.size, 4 * sequences), "<i4")
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
    bounds = np.frombuffer(inputs.fetch(idx, _MEGATRON.size + 12 * sequences, 8 * documents), "<i8")
    if (lengths < 0).any() or ends[-1] * dtype.itemsize != tokens.size_bytes:
        raise CorruptData(f"{idx.uri} counts {ends[-1]} tokens of {dtype}, {tokens.uri} has another size")
    if len(bounds) and not 0 <= bounds.min() <= bounds.max() <= sequences:
        raise CorruptData(f"{idx.uri} has documents outside its {sequences} sequences")
    return Payload(at, 0, tokens.size_bytes, dtype), ends[bounds]
