"""Compiles token files to sequences of `seq_len` (+ `overlap`) tokens.

The files are `.bin`, raw or with a known header, `.npy`, Megatron's `.bin` with `.idx`, and datatrove's `.ds`. The tokens
of a file are one stream: sample i is tokens [i * seq_len, (i + 1) * seq_len + overlap). Extents are cut every
`extent_bytes` of a file for any `seq_len`, so that datasets of different lengths share them; a sequence may span two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from cachesvc.catalog.columns import Ints
from cachesvc.catalog.compiler import Draft, Inputs, ListedObject, in_threads
from cachesvc.catalog.formats.records import (
    Cut,
    Payload,
    check_payloads,
    is_headerless,
    lay_out,
    npy_payload,
    parse_dtype,
    raw_payload,
)
from cachesvc.catalog.parsing import token_indices
from cachesvc.core.errors import InvalidInput
from cachesvc.core.model import PAGE_BYTES

_Beside = Mapping[str, int]
"""The indices of files beside tokens, by their URIs, with extensions in lower case."""
_TOKENS = ("bin", "npy", "ds")


def select(entries: Sequence[ListedObject]) -> list[ListedObject]:
    """Choose the objects that hold tokens, and the files that say where their documents begin."""
    return [entry for entry in entries if entry.extension in _TOKENS or _is_beside(entry)]


def _is_beside(entry: ListedObject) -> bool:
    return entry.name.lower().endswith(token_indices.ENDINGS)


def compile_tokens(inputs: Inputs) -> Draft:
    """Compile token files. Raises InvalidInput without `seq_len` or a dtype, CorruptData for a broken index."""
    options = inputs.options
    if options.seq_len <= 0 or options.overlap < 0:
        raise InvalidInput(
            f"{inputs.uri}: token files need seq_len (--seq-len), the tokens of a sample, and overlap >= 0"
        )
    beside = {_lowered(entry): at for at, entry in enumerate(inputs.entries) if _is_beside(entry)}
    shards = [at for at, entry in enumerate(inputs.entries) if not _is_beside(entry)]
    payloads, documents, stream = [], [], 0
    for payload, bounds in in_threads(lambda at: _shard(inputs, at, beside), shards):
        if bounds is not None:
            documents.append(bounds + stream)
        payloads.append(payload)
        stream += payload.length // payload.dtype.itemsize
    stems = {_stem(inputs.entries[at]) for at in shards}
    unpaired = [at for uri, at in beside.items() if uri.endswith(".idx") and uri[:-4] not in stems]
    _check(inputs, payloads, [inputs.entries[at].object.uri for at in unpaired])
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


def _lowered(entry: ListedObject) -> str:
    end = next(end for end in token_indices.ENDINGS if entry.name.lower().endswith(end))
    return entry.object.uri[: -len(end)] + end


def _shard(inputs: Inputs, at: int, beside: _Beside) -> tuple[Payload, Ints | None]:
    """Return the tokens of a file, and its document bounds where it has an index."""
    entry = inputs.entries[at]
    index = beside.get(f"{_stem(entry)}.idx")
    if index is not None:
        tokens = entry.object
        dtype, bounds = token_indices.megatron(inputs.fetch, tokens, inputs.entries[index].object)
        return Payload(at, 0, tokens.size_bytes, dtype), bounds
    return _datatrove(inputs, at, beside) if entry.extension == "ds" else (_plain(inputs, at), None)


def _datatrove(inputs: Inputs, at: int, beside: _Beside) -> tuple[Payload, Ints | None]:
    """Return the tokens of a `.ds`, of the type that its metadata states unless one is given, and its document bounds."""
    tokens = inputs.entries[at].object
    stem = _stem(inputs.entries[at])
    metadata = beside.get(stem + token_indices.DATATROVE_METADATA)
    index = beside.get(stem + token_indices.DATATROVE_INDEX)
    dtype = parse_dtype(inputs.options.dtype) if inputs.options.dtype else None
    if dtype is None and metadata is not None:
        dtype = token_indices.datatrove_dtype(inputs.fetch, inputs.entries[metadata].object)
    if dtype is None:
        raise InvalidInput(
            f"{tokens.uri} does not say of what type its tokens are: give dtype='uint16', or 'uint32' for a vocabulary of "
            "more than 65,536"
        )
    payload = _whole(inputs, Payload(at, 0, tokens.size_bytes, dtype))
    if index is None:
        return payload, None
    return payload, token_indices.datatrove_bounds(inputs.fetch, tokens, inputs.entries[index].object, dtype)


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
    if stated is not None and stated.shape:
        raise InvalidInput(f"dtype {options.dtype!r} of tokens cannot have a shape")
    if entry.extension == "npy" and not (stated is not None and is_headerless(inputs, at)):
        payload = npy_payload(inputs, at)
        if stated is not None and stated != payload.dtype:
            raise InvalidInput(f"{entry.object.uri} holds {payload.dtype.str}, not dtype {options.dtype}")
        return payload
    return _whole(inputs, raw_payload(inputs, at, stated))


def _whole(inputs: Inputs, payload: Payload) -> Payload:
    """Return a payload, whose last token may be cut off. Raises InvalidInput for a length that tokens of another type
    explain."""
    width = payload.dtype.itemsize
    if payload.length % width and payload.length % 2 == 0:
        raise InvalidInput(
            f"{inputs.entries[payload.object].object.uri} has {payload.length:,} bytes, no whole number of "
            f"{payload.dtype.name} tokens: give its own dtype= (uint16?), or write it anew if it was cut"
        )
    return payload
