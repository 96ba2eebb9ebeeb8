"""Reads the files beside token files that say where documents begin.

Megatron's `x.idx` of `x.bin`: its type, the length of each sequence, and the sequences at which documents begin.
datatrove's `x.ds.index` of `x.ds`: u64 ends of the documents, in tokens; and `x.ds.metadata`, text that begins with
`tokenizer|bytes of a token`.
https://github.com/huggingface/datatrove/blob/main/src/datatrove/pipeline/tokens/tokenizer.py
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from cachesvc.catalog.columns import Ints
from cachesvc.core.errors import CorruptData
from cachesvc.core.model import ObjectVersion

DATATROVE_INDEX, DATATROVE_METADATA = ".ds.index", ".ds.metadata"
ENDINGS = (".idx", DATATROVE_INDEX, DATATROVE_METADATA)
"""Ends of the names of such files, in lower case."""
_MEGATRON = struct.Struct("<9sQBQQ")
_MAGIC = b"MMIDIDX\x00\x00"
_MEGATRON_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
_METADATA_BYTES = 4096
_DATATROVE_DTYPES = {"2": "<u2", "4": "<u4"}
Fetch = Callable[[ObjectVersion, int, int], bytes]


def megatron(fetch: Fetch, tokens: ObjectVersion, idx: ObjectVersion) -> tuple[np.dtype[Any], Ints]:
    """Return the type of the tokens of a `.bin`, and the bounds of its documents in tokens. Raises CorruptData."""
    raw = fetch(idx, 0, min(idx.size_bytes, _MEGATRON.size))
    if len(raw) < _MEGATRON.size:
        raise CorruptData(f"{idx.uri} is shorter than a Megatron header")
    magic, version, code, sequences, documents = _MEGATRON.unpack(raw)
    if magic != _MAGIC or version != 1 or code not in _MEGATRON_DTYPES:
        raise CorruptData(f"{idx.uri} is no Megatron index: magic {magic!r}, version {version}, type {code}")
    if idx.size_bytes < _MEGATRON.size + 12 * sequences + 8 * documents:
        raise CorruptData(f"{idx.uri} is truncated: {sequences} sequences and {documents} documents expected")
    dtype: np.dtype[Any] = np.dtype(_MEGATRON_DTYPES[code])
    lengths = np.frombuffer(fetch(idx, _MEGATRON.size, 4 * sequences), "<i4")
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
    bounds = np.frombuffer(fetch(idx, _MEGATRON.size + 12 * sequences, 8 * documents), "<i8")
    if (lengths < 0).any() or ends[-1] * dtype.itemsize != tokens.size_bytes:
        raise CorruptData(f"{idx.uri} counts {ends[-1]} tokens of {dtype}, {tokens.uri} has another size")
    if len(bounds) and not 0 <= bounds.min() <= bounds.max() <= sequences:
        raise CorruptData(f"{idx.uri} has documents outside its {sequences} sequences")
    return dtype, ends[bounds]


def datatrove_dtype(fetch: Fetch, metadata: ObjectVersion) -> np.dtype[Any] | None:
    """Return the type of the tokens of a `.ds` as its metadata states it, None where that states none."""
    first = fetch(metadata, 0, min(metadata.size_bytes, _METADATA_BYTES)).partition(b"\n")[0]
    stated = _DATATROVE_DTYPES.get(first.rpartition(b"|")[2].strip().decode("ascii", "replace"))
    return None if stated is None else np.dtype(stated)


def datatrove_bounds(fetch: Fetch, tokens: ObjectVersion, index: ObjectVersion, dtype: np.dtype[Any]) -> Ints:
    """Return the bounds of the documents of a `.ds`, in tokens. Raises CorruptData for an index of other tokens."""
    count = tokens.size_bytes // dtype.itemsize
    ends = np.frombuffer(fetch(index, 0, index.size_bytes // 8 * 8), "<u8")
    rising = (ends[1:] >= ends[:-1]).all()
    if index.size_bytes % 8 or not rising or (int(ends[-1]) if len(ends) else 0) != count:
        raise CorruptData(
            f"{index.uri} does not end its documents at the {count:,} tokens of {tokens.uri}, read as {dtype.name}: give "
            "another dtype=, or write both anew"
        )
    return np.append(np.int64(0), ends.astype(np.int64))
