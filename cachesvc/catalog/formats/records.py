"""Compiles records of one size, and lays out runs of samples for records and tokens without an entry per sample.

Headers of token shards are recognised by the tools that write them.
llm.c and modded-nanogpt: 256 int32, the first three are a magic number, a version and the count of tokens.
https://github.com/karpathy/llm.c/blob/master/dev/data/data_common.py
litgpt's PackedDataset: a magic text, u64 version, u8 type and u64 count of tokens.
https://github.com/Lightning-AI/litgpt/blob/3f3189b/lit_gpt/packed_dataset.py
"""

from __future__ import annotations

import io
import math
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from tokenize import TokenError
from typing import Any

import numpy as np

from cachesvc.catalog.address_space import AddressSpace, unit
from cachesvc.catalog.columns import ints
from cachesvc.catalog.compiler import Draft, Inputs, in_threads
from cachesvc.catalog.layout import Field
from cachesvc.core.errors import CorruptData, InvalidInput
from cachesvc.core.model import PAGE_BYTES, ObjectVersion

_NPY_HEADER_BYTES = 16 << 10
"""Bytes read of a header; numpy refuses headers of more than 10,000 characters."""
_MAX_DIMENSIONS = 32
"""Limit of numpy before 2.0."""
_HEAD_BYTES = 24
"""The first bytes of a file, enough to recognise its header."""
_LLMC = struct.Struct("<iii")
_LLMC_BYTES = 1024
_LLMC_TYPES = {20240520: (1, "<u2"), 20240801: (7, "<u4")}
"""Version and type by magic number: GPT-2's tokens, and Llama 3's."""
_LLMC_EVAL = 20240522
_ANYWAY = "header_bytes=%d and dtype= read it as it is"
_LITGPT = struct.Struct("<7sQBQ")
_LITGPT_MAGIC = b"LITPKDS"
_LITGPT_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f4", 7: "<f8", 8: "<u2"}


@dataclass(frozen=True, slots=True)
class _Header:
    """A header of `size_bytes`, followed by `tokens` numbers of `dtype`."""

    tool: str
    size_bytes: int
    dtype: np.dtype[Any]
    tokens: int


def _header_of(version: ObjectVersion, head: bytes) -> _Header | None:
    """Return the header of a file by its first `_HEAD_BYTES`; None where it has no known header.

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


def _llmc(uri: str, head: bytes) -> _Header | None:
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
    return _Header("llm.c", _LLMC_BYTES, np.dtype(dtype), tokens)


def _litgpt(uri: str, head: bytes) -> _Header:
    if len(head) < _LITGPT.size:
        raise CorruptData(f"{uri} ends inside its header (litgpt)")
    _, version, code, tokens = _LITGPT.unpack(head[: _LITGPT.size])
    if version != 1 or code not in _LITGPT_TYPES:
        raise InvalidInput(
            f"{uri} has a header of litgpt of version {version} and type {code}, which is unknown: "
            f"{_ANYWAY % _LITGPT.size}"
        )
    return _Header("litgpt", _LITGPT.size, np.dtype(_LITGPT_TYPES[code]), tokens)


@dataclass(frozen=True, slots=True)
class Payload:
    """The part of an object that holds items: bytes [offset, offset + length).

    `header`: the tool that wrote the header before it, "" for no known header; None in a format that always has one.
    """

    object: int
    offset: int
    length: int
    dtype: np.dtype[Any]
    row_shape: tuple[int, ...] | None = None
    header: str | None = None


@dataclass(frozen=True, slots=True)
class Cut:
    """The cutting of payloads into samples and extents: a sample of `record` bytes starts every `stride` bytes."""

    record: int
    stride: int
    extent_bytes: int
    whole_payload: bool


def parse_dtype(text: str) -> np.dtype[Any]:
    """Parse a numpy dtype, which may have a shape. Raises InvalidInput, also for objects, which would be unpickled."""
    try:
        dtype = np.dtype(text)
    except (TypeError, ValueError, SyntaxError) as error:
        raise InvalidInput(f"dtype {text!r} is not one that numpy knows") from error
    if dtype.hasobject or dtype.itemsize == 0 or dtype.names is not None:
        raise InvalidInput(f"dtype {text!r} is not a plain number type")
    return dtype


def is_headerless(inputs: Inputs, index: int) -> bool:
    """Tell whether a `.npy` file has no header, as those of OLMo's and Dolma's tools: tokens alone, of `np.memmap`."""
    version = inputs.entries[index].object
    magic = np.lib.format.MAGIC_PREFIX
    return inputs.fetch(version, 0, min(version.size_bytes, len(magic))) != magic


def npy_payload(inputs: Inputs, index: int) -> Payload:
    """Locate the items of a `.npy` file.

    Raises CorruptData for a broken header or too few bytes, InvalidInput for arrays of objects or in Fortran order.
    """
    version = inputs.entries[index].object
    head = io.BytesIO(inputs.fetch(version, 0, min(version.size_bytes, _NPY_HEADER_BYTES)))
    try:
        magic = np.lib.format.read_magic(head)
        if magic > (2, 0):
            raise InvalidInput(f"{version.uri} has an .npy header of version {magic}; 1.0 and 2.0 are read")
        read = np.lib.format.read_array_header_1_0 if magic == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(head)
    except InvalidInput:
        raise
    except (ValueError, SyntaxError, TypeError, RecursionError, TokenError, MemoryError) as error:
        # TokenError: brackets that do not close. MemoryError: brackets nested too deep for Python's parser.
        raw = not head.getvalue().startswith(np.lib.format.MAGIC_PREFIX)
        hint = "; numbers without a header need format='tokens', seq_len= and dtype=" if raw else ""
        raise CorruptData(f"{version.uri} has a broken .npy header: {error}{hint}") from error
    if dtype.hasobject or (fortran and len(shape) > 1):
        raise InvalidInput(f"{version.uri} holds Python objects or Fortran order; save plain C-order arrays")
    if not dtype.itemsize:
        raise InvalidInput(f"{version.uri} holds items of no bytes ({dtype.str})")
    if dtype.names is not None and shape:
        dtype, shape = np.dtype(np.uint8), (*shape, dtype.itemsize)
    if min(shape, default=0) < 0 or max(shape, default=0) >> 63 or len(shape) > _MAX_DIMENSIONS:
        raise CorruptData(f"{version.uri} has a broken .npy header: no array has such a shape")
    length = math.prod(map(int, shape)) * dtype.itemsize
    if head.tell() + length > version.size_bytes:
        raise CorruptData(
            f"{version.uri} has {version.size_bytes} bytes, its header promises {length} of data"
        )
    return Payload(index, head.tell(), length, dtype, tuple(shape[1:]) if shape else None)


def raw_payload(
    inputs: Inputs, index: int, stated: np.dtype[Any] | None, known_headers: bool = True
) -> Payload:
    """Locate the items of a `.bin`: behind `header_bytes` if given, else behind a known tool's header, else at the start.

    `known_headers`: whether to look for such a header. Raises InvalidInput where the type is unknown, or the header states
    another one than `stated`, and the errors of `_header_of`.
    """
    version, skipped = inputs.entries[index].object, inputs.options.header_bytes
    if known_headers and not skipped:
        header = _header_of(version, inputs.fetch(version, 0, min(_HEAD_BYTES, version.size_bytes)))
        if header is not None and stated is not None and stated != header.dtype:
            raise InvalidInput(
                f"{version.uri} holds {header.dtype.str} by its header ({header.tool}), not dtype {inputs.options.dtype}"
            )
        if header is not None:
            length = version.size_bytes - header.size_bytes
            return Payload(index, header.size_bytes, length, header.dtype, header=header.tool)
    if stated is None:
        raise InvalidInput(f"{version.uri}: raw tokens need dtype (uint16, say)")
    if skipped > version.size_bytes:
        raise InvalidInput(
            f"{version.uri} has {version.size_bytes:,} bytes, fewer than header_bytes {skipped:,}"
        )
    return Payload(index, skipped, version.size_bytes - skipped, stated, header="")


def check_payloads(inputs: Inputs, payloads: Sequence[Payload]) -> None:
    """Raise InvalidInput where only some files have a header, or `header_bytes` is given for a format with headers."""
    raw = [payload for payload in payloads if payload.header is not None]
    uris = {bool(each.header): inputs.entries[each.object].object.uri for each in raw}
    if len(uris) > 1:
        raise InvalidInput(
            f"{uris[True]} begins with a known header, {uris[False]} does not: "
            "open them apart, or give header_bytes"
        )
    if inputs.options.header_bytes and len(raw) < len(payloads):
        raise InvalidInput(f"{inputs.uri}: header_bytes is for raw .bin files, not for .npy and Megatron's")


def compile_records(inputs: Inputs) -> Draft:
    """Compile `.bin` files (by `record_bytes` or `dtype`) and `.npy` files (a record is a row).

    A tail that is not a whole record is left out, with a note. Raises InvalidInput for files of different types, and the
    errors of their headers.
    """
    payloads = list(in_threads(partial(_record_payload, inputs), range(len(inputs.entries))))
    check_payloads(inputs, payloads)
    first = payloads[0]
    shape = first.row_shape or ()
    for payload in payloads:
        if (payload.dtype, payload.row_shape) != (first.dtype, first.row_shape):
            uris = [inputs.entries[each.object].object.uri for each in (first, payload)]
            raise InvalidInput(f"{uris[0]} and {uris[1]} hold records of different type or shape")
    record = math.prod(shape) * first.dtype.itemsize
    if record <= 0:
        raise InvalidInput(f"{inputs.uri}: a record of {record} bytes; give record_bytes or dtype")
    common = unit(record, inputs.options.extent_bytes)
    multiple = common if common <= inputs.options.extent_bytes else PAGE_BYTES
    cut = Cut(record, record, inputs.options.extent_bytes // multiple * multiple, False)
    return lay_out(inputs, payloads, cut, "record", shape)


def _record_payload(inputs: Inputs, index: int) -> Payload:
    entry, options = inputs.entries[index], inputs.options
    if entry.extension == "npy":
        payload = npy_payload(inputs, index)
        if payload.row_shape is None:
            raise InvalidInput(f"{entry.object.uri} is a scalar; records are the rows of an array")
        return payload
    if not options.dtype and options.record_bytes <= 0:
        raise InvalidInput(f"{entry.object.uri}: raw records need record_bytes or dtype")
    dtype = parse_dtype(options.dtype or "u1")
    shape: tuple[int, ...] = dtype.shape
    if options.record_bytes and options.record_bytes != dtype.itemsize:
        if options.record_bytes % dtype.itemsize or shape:
            raise InvalidInput(f"record_bytes {options.record_bytes} is no multiple of dtype {options.dtype}")
        shape = (options.record_bytes // dtype.itemsize,)
    may_be_tokens = dtype.base.kind in "iu" and dtype.base.itemsize > 1
    return replace(raw_payload(inputs, index, dtype.base, known_headers=may_be_tokens), row_shape=shape)


def lay_out(
    inputs: Inputs, payloads: Sequence[Payload], cut: Cut, field: str, shape: tuple[int, ...]
) -> Draft:
    """Lay out payloads one after another, each from an address where a stride and a page begin together."""
    space, notes = AddressSpace([entry.object for entry in inputs.entries]), []
    runs_first, runs_slot, runs_object, firsts, samples = array("q"), array("q"), array("q"), array("q"), 0
    for done, payload in enumerate(payloads):
        count = max(0, (payload.length - cut.record) // cut.stride + 1)
        used = (count - 1) * cut.stride + cut.record if count else 0
        if used < payload.length:
            uri = inputs.entries[payload.object].object.uri
            notes.append(f"{uri}: the last {payload.length - used} bytes are no whole sample and left out")
        if not count:
            continue
        kept = payload.length if cut.whole_payload else used
        start = space.add_run(payload.object, payload.offset, kept, cut.extent_bytes, cut.stride)
        runs_first.append(samples)
        runs_slot.append(start // cut.stride)
        runs_object.append(payload.object)
        begins = range(0, kept, cut.extent_bytes)
        firsts.extend(samples + min(count, -(-begin // cut.stride)) for begin in begins)
        samples += count
        inputs.progress(done + 1, len(payloads))
    dtype = payloads[0].dtype.str
    return Draft(
        kind="fixed",
        space=space,
        fields=(Field(field, dtype),),
        extent_first=ints([*firsts, samples]),
        head={
            "record_bytes": cut.record,
            "stride_bytes": cut.stride,
            "dtype": dtype,
            "shape": shape,
        },
        columns={
            "run.first": ints(runs_first),
            "run.slot": ints(runs_slot),
            "run.object": ints(runs_object),
        },
        notes=notes,
    )
