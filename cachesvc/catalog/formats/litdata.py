"""Compiles what litData's `optimize` writes, from `index.json`, which describes the chunks; their items are not read.

A chunk is one extent. It begins with u32 items and u32 offsets[items + 1]; an item begins with the u32 sizes of its values.
Compressed chunks are decoded while they are filled. Items that are compressed one by one are decoded when they are read.
The items of `TokensLoader` are one stream of tokens behind the offsets. Dicts of texts, lists and the like are an Arrow IPC
file behind the offsets, then its u32 size and `_ARROW_MAGIC`; their extents are runs of record batches.
"""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import zstandard

from cachesvc.catalog.address_space import AddressSpace
from cachesvc.catalog.columns import ints
from cachesvc.catalog.compiler import Draft, Inputs, ListedObject, in_threads
from cachesvc.catalog.formats.arrow import compile_ipc
from cachesvc.catalog.formats.records import Cut, Payload, lay_out
from cachesvc.catalog.kinds import kind_of
from cachesvc.catalog.layout import LITDATA, Field, check_count
from cachesvc.catalog.parsing.json_index import JsonRecord, Listed, indices, stream_of
from cachesvc.core.errors import CorruptData, InvalidInput
from cachesvc.core.model import PAGE_BYTES, ObjectVersion
from cachesvc.sources.framed_zstd import CODEC, HEAD, items_of

_ARROW_TAIL, _ARROW_MAGIC = struct.Struct("<I8s"), b"LDARW01\0"
_MAX_FIELDS = 1024
_MAX_HEADS = 1024
"""Number of plain chunks whose first bytes are compared with the index."""
_FRAME_HEAD_BYTES = 18
_TOKENS = {
    8: "<f2",
    11: "|u1",
    12: "|i1",
    13: "<i2",
    14: "<i2",
    15: "<i4",
    16: "<i4",
    17: "<i8",
    18: "<i8",
    20: "<u2",
}
"""Types of tokens by litData's numbers of torch's dtypes."""
_NUMPY_TOKENS = dict(enumerate(("|i1", "<i2", "<i4", "<i8", "|u1", "<u2", "<u4", "<u8")))


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One entry of `chunks`: its object, by index, and its counts of items and tokens. `codec`: "", zstd or `CODEC`."""

    object: int
    items: int
    tokens: int
    bytes: int
    codec: str
    where: str


@dataclass(frozen=True, slots=True)
class _Config:
    """The part of `config` about all chunks. `form`: the granularity of compression, one of chunk, batch and sample."""

    form: str
    loader: str
    fields: tuple[Field, ...]


def select(entries: Sequence[ListedObject]) -> list[ListedObject]:
    """Choose indices and chunks."""
    return [entry for entry in entries if entry.name == "index.json" or kind_of(entry.name) == "litdata"]


def compile_litdata(inputs: Inputs) -> Draft:
    """Compile by the index. Raises CorruptData naming file and field, InvalidInput for features that are not read, and for
    tokens without `seq_len`."""
    chunks: list[_Chunk] = []
    configs: list[_Config] = []
    listed = Listed(inputs, "items")
    for index in indices(inputs, "litData"):
        config, found = _read_index(inputs, index, listed)
        configs.append(config)
        chunks += found
        if config != configs[0]:
            raise InvalidInput(f"{index.object.uri} describes other values than the indices before it")
    config = configs[0]
    if not chunks:
        raise InvalidInput(f"{inputs.uri} has an index.json of litData without chunks")
    if config.loader == "TokensLoader":
        return _tokens(inputs, config, chunks)
    if inputs.options.seq_len or inputs.options.overlap:
        raise InvalidInput(f"{inputs.uri} was not written for TokensLoader: leave out seq_len and overlap")
    if _arrow_range(inputs, chunks[0]):
        return _rows(inputs, chunks)
    space, firsts, samples = AddressSpace([entry.object for entry in inputs.entries]), array("q"), 0
    for chunk, size in zip(chunks, _sizes(inputs, chunks), strict=True):
        if size < 4 * (chunk.items + 2) or size >> 32:
            raise CorruptData(f"{chunk.where} has {size:,} bytes for {chunk.items:,} items: write it anew")
        space.add([(chunk.object, 0, size)], chunk.codec)
        firsts.append(samples)
        samples += chunk.items
        inputs.progress(len(firsts), len(chunks))
    packed = {"packed_rows": True} if config.form == "sample" else {}
    return Draft(
        kind="indirect",
        space=space,
        fields=config.fields,
        extent_first=ints([*firsts, samples]),
        head={"sizes": [-1] * len(config.fields), **packed},
    )


def _rows(inputs: Inputs, chunks: Sequence[_Chunk]) -> Draft:
    """Compile chunks that are all Arrow."""
    ranges = list(in_threads(lambda chunk: _arrow_range(inputs, chunk), chunks))
    for chunk, found in zip(chunks, ranges, strict=True):
        if found is None:
            uri = inputs.entries[chunk.object].object.uri
            raise InvalidInput(f"{uri} holds no Arrow, and chunks before it do: write them anew")
    draft = compile_ipc(inputs, [found for found in ranges if found is not None])
    stated, held = sum(chunk.items for chunk in chunks), int(draft.extent_first[-1])
    if held != stated:
        raise CorruptData(
            f"{inputs.uri} says that it holds {stated:,} items, and its chunks hold {held:,}: write it anew"
        )
    return draft


def _arrow_range(inputs: Inputs, chunk: _Chunk) -> tuple[int, int, int] | None:
    """Return the object of a chunk, and begin and end of the Arrow file in it; None if it holds none."""
    version = inputs.entries[chunk.object].object
    end = version.size_bytes - _ARROW_TAIL.size
    if chunk.codec or end < 0:
        return None
    size, magic = _ARROW_TAIL.unpack(inputs.fetch(version, end, _ARROW_TAIL.size))
    if magic != _ARROW_MAGIC:
        return None
    if size > end:
        raise CorruptData(f"{version.uri} is truncated before its Arrow file: write it anew")
    return chunk.object, end - size, end


def _tokens(inputs: Inputs, config: _Config, chunks: Sequence[_Chunk]) -> Draft:
    seq_len, overlap = inputs.options.seq_len, inputs.options.overlap
    if not seq_len:
        raise InvalidInput(
            f"{inputs.uri} holds tokens, which need seq_len= (--seq-len): TokensLoader's block_size"
        )
    kind, _, number = config.fields[0].encoding.removeprefix(LITDATA).partition(":")
    known = _TOKENS if kind == "no_header_tensor" else _NUMPY_TOKENS if kind == "no_header_numpy" else {}
    dtype = known.get(int(number) if number.isdecimal() else -1)
    if dtype is None or len(config.fields) != 1:
        raise InvalidInput(
            f"{inputs.uri} holds tokens of type {config.fields[0].encoding!r}, which is not read"
        )
    width, payloads = np.dtype(dtype).itemsize, []
    for chunk in chunks:
        version = inputs.entries[chunk.object].object
        begin = 4 * (chunk.items + 2)
        if chunk.codec:
            raise InvalidInput(
                f"{version.uri} holds compressed tokens, which are not read: write them without compression="
            )
        if begin + chunk.tokens * width > version.size_bytes:
            raise CorruptData(f"{chunk.where}: {version.uri} is too small for {chunk.tokens:,} tokens")
        payloads.append(Payload(chunk.object, begin, chunk.tokens * width, np.dtype(dtype)))
    _sizes(inputs, chunks)  # compares the heads
    cut_bytes = max(PAGE_BYTES, inputs.options.extent_bytes // PAGE_BYTES * PAGE_BYTES)
    cut = Cut((seq_len + overlap) * width, seq_len * width, cut_bytes, True)
    return lay_out(inputs, payloads, cut, "tokens", (seq_len + overlap,))


def _sizes(inputs: Inputs, chunks: Sequence[_Chunk]) -> list[int]:
    """Return the decoded size of each chunk. Reads the heads of compressed ones, and of the first plain ones."""

    def size(at: int) -> int:
        chunk = chunks[at]
        version = inputs.entries[chunk.object].object
        if not chunk.codec:
            if at < _MAX_HEADS:
                head = inputs.fetch(version, 0, min(4, version.size_bytes))
                check_count(version.uri, int.from_bytes(head, "little"), chunk.items, chunk.where, "items")
            return version.size_bytes
        head = inputs.fetch(version, 0, min(version.size_bytes, HEAD.size))
        return (_zstd_size if chunk.codec == "zstd" else _framed_size)(inputs, version, chunk, head)

    return list(in_threads(size, range(len(chunks))))


def _zstd_size(inputs: Inputs, version: ObjectVersion, chunk: _Chunk, head: bytes) -> int:
    try:
        size_bytes = zstandard.frame_content_size(head[:_FRAME_HEAD_BYTES])
    except zstandard.ZstdError as error:
        raise CorruptData(f"{version.uri} is no valid zstd: {error}; write it anew") from error
    return chunk.bytes if size_bytes < 0 else int(size_bytes)


def _framed_size(inputs: Inputs, version: ObjectVersion, chunk: _Chunk, head: bytes) -> int:
    items = items_of(version.uri, head)
    check_count(version.uri, items, chunk.items, chunk.where, "items")
    last = HEAD.size + 4 * items
    if last + 4 > version.size_bytes:
        raise CorruptData(f"{version.uri} is truncated in its offsets: write it anew")
    return 4 * (items + 2) + int.from_bytes(inputs.fetch(version, last, 4), "little")


def _read_index(inputs: Inputs, index: ListedObject, listed: Listed) -> tuple[_Config, list[_Chunk]]:
    uri, stream = index.object.uri, stream_of(inputs, index)
    chunks: list[tuple[str, int, int, int]] | None = None
    config: Any = None
    for name in stream.fields():
        if name == "chunks":
            records = (JsonRecord(f"{uri}: chunks[{at}]", value) for at, value in enumerate(stream.items()))
            chunks = [_entry(record) for record in records]
        else:
            value = stream.value()
            config = value if name == "config" else config
    if chunks is None:
        raise CorruptData(f"{uri}: field 'chunks' is missing")
    found = _config(JsonRecord(f"{uri}: config", JsonRecord(uri, {"config": config}).take("config", dict)))
    form = CODEC if found.form == "batch" else ""
    placed = []
    for number, (name, items, tokens, size) in enumerate(chunks):
        where = f"{uri}: chunks[{number}]"
        codec = "zstd" if ".zstd" in name else form
        placed.append(_Chunk(listed.place(index, name, where), items, tokens, size, codec, where))
    return found, placed


def _entry(record: JsonRecord) -> tuple[str, int, int, int]:
    """Return the name of a chunk, and its counts of items, tokens and bytes."""
    name, items = record.take("filename", str), record.take("chunk_size", int)
    tokens = 0 if record.value.get("dim") is None else record.take("dim", int)
    return name, items, tokens, record.take("chunk_bytes", int)


def _config(record: JsonRecord) -> _Config:
    value = record.value
    compression = str(value.get("compression") or "").partition(":")[0]
    loader = str(value.get("item_loader") or "PyTreeLoader")
    for wrong, what in (
        (compression not in ("", "zstd"), f"is compressed with {compression!r}; none and zstd are read"),
        (bool(value.get("encryption")), "is encrypted, which is not read"),
        (loader == "ParquetLoader", "is of Parquet files: open them with format='parquet'"),
        (
            loader not in ("PyTreeLoader", "TokensLoader", "ParquetLoader"),
            f"is for {loader}, which is not read",
        ),
    ):
        if wrong:
            raise InvalidInput(f"{record.where} {what}")
    form = str(value.get("compression_level") or "chunk") if compression else "chunk"
    if form not in ("chunk", "batch", "sample"):
        raise InvalidInput(f"{record.where} has compression_level {form!r}; chunk, batch and sample are read")
    types = record.take("data_format", list)
    if not 0 < len(types) <= _MAX_FIELDS or not all(isinstance(each, str) for each in types):
        raise CorruptData(f"{record.where}: field 'data_format' is no list of 1 to {_MAX_FIELDS:,} texts")
    names = _names(record)
    if len(names) != len(types) or len(set(names)) != len(names):
        raise CorruptData(f"{record.where}: data_spec names {len(names)} values, data_format {len(types)}")
    return _Config(form, loader, tuple(Field(n, f"{LITDATA}{t}") for n, t in zip(names, types, strict=True)))


def _names(record: JsonRecord) -> list[str]:
    """Return the paths of the values in an item, as `a`, `nested.b`, `pair.0`; "value" for an item of a single one.

    `data_spec` is torch's tree of them in JSON: `[1, {"type", "context", "children_spec"}]`; the context of a dict, itself
    JSON, lists its keys.
    """
    wrong = CorruptData(f"{record.where}: field 'data_spec' is no tree of values")
    try:
        tree = json.loads(record.take("data_spec", str))
        return [".".join(path) or "value" for path in _paths(tree[1], ())]
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        raise wrong from None


def _paths(node: Any, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    children = node["children_spec"]
    if node["type"] is None:
        yield path
        return
    context = json.loads(node["context"])
    keys = context if isinstance(context, list) and len(context) == len(children) else range(len(children))
    for key, child in zip(keys, children, strict=True):
        yield from _paths(child, (*path, str(key)))
