"""Reads where the buffers of Arrow IPC files and streams lie, from their metadata alone.

https://arrow.apache.org/docs/format/Columnar.html#serialization-and-interprocess-communication-ipc
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from cachesvc.core.errors import CacheError, CorruptData, InvalidInput

MAGIC, FEATHER_1 = b"ARROW1", b"FEA1"
_MARK = 0xFFFFFFFF
"""Begins a message since Arrow 0.15; before, its length did."""
_METADATA_BYTES = 64 << 20
"""Limit of the metadata of one message: a hundred thousand columns."""
_WINDOW_BYTES = 64 << 10
"""The least that is read at once: short batches lie several in it."""
_SCHEMA, _DICTIONARY, _BATCH = 1, 2, 3
_CODECS = ("lz4", "zstd")
_V4 = 3
_MOST_ROWS = 1 << 48
Pairs = npt.NDArray[np.int64]
Read = Callable[[int, int], bytes]
"""Reads [offset, offset + length) of a file."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Rows of an IPC file.

    `nodes` [n, 2]: length and nulls of each field, depth first. `buffers` [n, 2]: offset in the file and length of each
    buffer. `views`: the number of buffers of each column of views. `begin`, `end`: of the body. `codec`: "" for plain
    buffers. `dictionaries`: the batch of each dictionary that holds for these rows, by id.
    """

    rows: int
    nodes: Pairs
    buffers: Pairs
    views: tuple[int, ...]
    begin: int
    end: int
    codec: str
    dictionaries: dict[int, Batch] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class IpcFile:
    """`schema`: the message of the schema, or an IPC file without rows. `ids`: the id of each dictionary-encoded field,
    depth first."""

    schema: bytes
    ids: tuple[int, ...]
    batches: tuple[Batch, ...]


def read_ipc(uri: str, begin: int, end: int, read: Read) -> IpcFile:
    """Read the metadata of the IPC file or stream that is [begin, end) of a file. All offsets are the file's. Raises
    CorruptData, and InvalidInput for what is not read."""
    window = _Window(begin, end, read)
    try:
        if window.get(begin, min(end - begin, len(MAGIC))) == MAGIC:
            return _File(uri, window).read()
        if window.get(begin, min(end - begin, len(FEATHER_1))) == FEATHER_1:
            raise InvalidInput(f"{uri} is Feather version 1: write it with pyarrow.feather.write_feather")
        return _stream(uri, _messages(window))
    except (struct.error, ValueError, IndexError, OverflowError) as error:
        if isinstance(error, CacheError):
            raise
        raise CorruptData(f"{uri} is no Arrow file: {error}; write it anew") from error


class _Window:
    """Reads [begin, end) of a file in windows. Raises ValueError for bytes outside."""

    def __init__(self, begin: int, end: int, read: Read) -> None:
        self.begin, self.end, self._read = begin, end, read
        self._held_at, self._held = begin, b""

    def get(self, at: int, length: int) -> bytes:
        if not self.begin <= at <= at + length <= self.end:
            raise ValueError(f"it ends after {self.end:,} bytes, before {at + length:,}: it was cut")
        if not self._held_at <= at <= at + length <= self._held_at + len(self._held):
            self._held_at = at
            self._held = self._read(at, min(max(length, _WINDOW_BYTES), self.end - at))
        return self._held[at - self._held_at : at - self._held_at + length]


class _Table:
    """A table of flatbuffers. Raises ValueError or struct.error for positions outside its data."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data, self._at = data, at
        self._vtable = at - self._unpack("<i", at)
        self._fields = self._unpack("<H", self._vtable)

    @classmethod
    def root(cls, data: bytes) -> _Table:
        """Return the outermost table."""
        return cls(data, struct.unpack_from("<I", data)[0])

    def number(self, slot: int, kind: str) -> int:
        """Return a number, of a `struct` type; 0 where it is absent."""
        at = self._place(slot)
        return self._unpack(f"<{kind}", at) if at else 0

    def table(self, slot: int) -> _Table | None:
        """Return a table, None where it is absent."""
        at = self._place(slot)
        return _Table(self._data, at + self._unpack("<I", at)) if at else None

    def structs(self, slot: int, kind: str) -> list[tuple[int, ...]]:
        """Return a vector of structs."""
        begin, count = self._vector(slot)
        size = struct.calcsize(kind)
        if begin + count * size > len(self._data):
            raise ValueError(f"{count:,} entries in {len(self._data):,} bytes of metadata")
        return list(struct.iter_unpack(kind, self._data[begin : begin + count * size]))

    def pairs(self, slot: int) -> Pairs:
        """Return a vector of structs of two numbers, int64 [n, 2]."""
        return np.asarray(self.structs(slot, "<qq"), np.int64).reshape(-1, 2)

    def tables(self, slot: int) -> Iterator[_Table]:
        """Yield a vector of tables."""
        begin, count = self._vector(slot)
        if begin + 4 * count > len(self._data):
            raise ValueError(f"{count:,} fields in {len(self._data):,} bytes of metadata")
        for at in range(begin, begin + 4 * count, 4):
            yield _Table(self._data, at + self._unpack("<I", at))

    def _vector(self, slot: int) -> tuple[int, int]:
        at = self._place(slot)
        if not at:
            return 0, 0
        at += self._unpack("<I", at)
        return at + 4, self._unpack("<I", at)

    def _place(self, slot: int) -> int:
        if 6 + 2 * slot > self._fields:
            return 0
        offset = self._unpack("<H", self._vtable + 4 + 2 * slot)
        return self._at + offset if offset else 0

    def _unpack(self, kind: str, at: int) -> int:
        if at < 0:
            raise ValueError("its metadata points before its beginning")
        value: int = struct.unpack_from(kind, self._data, at)[0]
        return value


@dataclass(frozen=True, slots=True)
class _Message:
    """A message. `raw`: with its prefix. `body`: where its body begins."""

    kind: int
    header: _Table
    version: int
    raw: bytes
    body: int
    body_bytes: int

    @property
    def end(self) -> int:
        return self.body + self.body_bytes


def _message(window: _Window, at: int) -> _Message | None:
    """Return the message at a place, None at the end of a stream."""
    prefix = window.get(at, min(8, window.end - at))
    if len(prefix) < 4:
        _fail("it ends inside a message")
    first = int.from_bytes(prefix[:4], "little")
    width, length = (8, int.from_bytes(prefix[4:8], "little")) if first == _MARK else (4, first)
    if not length:
        return None
    if length > _METADATA_BYTES:
        _fail(f"a message of {length:,} bytes of metadata")
    raw = window.get(at, width + length)
    table = _Table.root(raw[width:])
    header, body_bytes = table.table(2), table.number(3, "q")
    if header is None or body_bytes < 0:
        _fail("a message without a header")
    message = _Message(
        table.number(1, "B"), header, table.number(0, "h"), raw, at + width + length, body_bytes
    )
    if message.end > window.end:
        _fail(f"a message ends at {message.end:,}, and it ends at {window.end:,}: it was cut")
    return message


def _fail(why: str) -> NoReturn:
    raise ValueError(why)


def _messages(window: _Window) -> Iterator[_Message]:
    at = window.begin
    while at < window.end and (message := _message(window, at)) is not None:
        yield message
        at = message.end


class _File:
    """An IPC file, which ends with a footer of blocks."""

    def __init__(self, uri: str, window: _Window) -> None:
        self._uri, self._window = uri, window

    def read(self) -> IpcFile:
        end = self._window.end - len(MAGIC) - 4
        tail = self._window.get(end, len(MAGIC) + 4)
        length = int.from_bytes(tail[:4], "little")
        if tail[4:] != MAGIC or not 0 < length <= min(end - self._window.begin, _METADATA_BYTES):
            _fail("it does not end with a footer: it was cut")
        raw = self._window.get(end - length, length)
        footer = _Table.root(raw)
        schema = footer.table(1)
        if schema is None:
            _fail("its footer has no schema")
        # Polars writes the schema in the footer alone; a file without rows is the footer between its marks.
        alone = MAGIC + bytes(2) + raw + tail
        return _collected(self._uri, alone, schema, footer.number(0, "h"), self._blocks(footer))

    def _blocks(self, footer: _Table) -> Iterator[_Message]:
        for slot in (2, 3):
            for offset, _, _ in footer.structs(slot, "<qi4xq"):
                message = _message(self._window, self._window.begin + offset)
                if message is None:
                    _fail("its footer names a place without a message")
                yield message


def _stream(uri: str, messages: Iterator[_Message]) -> IpcFile:
    schema = next(messages, None)
    if schema is None or schema.kind != _SCHEMA:
        raise ValueError("it does not begin with a schema")
    return _collected(uri, schema.raw, schema.header, schema.version, messages)


def _collected(uri: str, raw: bytes, schema: _Table, version: int, messages: Iterator[_Message]) -> IpcFile:
    if schema.number(0, "h"):
        raise InvalidInput(f"{uri} is big-endian, which is not read: write it on a little-endian machine")
    if version < _V4:
        raise InvalidInput(f"{uri} is of a version before Arrow 0.8, which is not read: write it anew")
    batches: list[Batch] = []
    dictionaries: dict[int, Batch] = {}
    for each in messages:
        if each.kind == _BATCH:
            batches.append(_batch(each, each.header, dict(dictionaries)))
        elif each.kind == _DICTIONARY:
            data = each.header.table(1)
            if data is None:
                raise ValueError("a dictionary without values")
            if each.header.number(2, "B"):
                raise InvalidInput(
                    f"{uri} has delta dictionaries, which are not read: write it with whole ones"
                )
            dictionaries[each.header.number(0, "q")] = _batch(each, data, dict(dictionaries))
        else:
            raise ValueError(f"a message of kind {each.kind} among the rows")
    return IpcFile(raw, tuple(_ids(schema.tables(1), 0)), tuple(batches))


def _batch(message: _Message, table: _Table, dictionaries: dict[int, Batch]) -> Batch:
    rows, packed = table.number(0, "q"), table.table(3)
    codec = ""
    if packed is not None:
        number = packed.number(0, "B")
        if number >= len(_CODECS):
            _fail(f"buffers packed by codec {number}, which no release of Arrow writes")
        codec = _CODECS[number]
    nodes, buffers = table.pairs(1), table.pairs(2)
    if not 0 <= rows < _MOST_ROWS or (nodes[:, 0] < 0).any() or (nodes[:, 0] >= _MOST_ROWS).any():
        _fail(f"a batch of {rows:,} rows")
    offsets, lengths = buffers[:, 0], buffers[:, 1]
    if (offsets < 0).any() or (lengths < 0).any() or (lengths > message.body_bytes - offsets).any():
        _fail("a buffer lies outside its message")
    buffers[:, 0] += message.body
    views = tuple(count for (count,) in table.structs(4, "<q"))
    return Batch(rows, nodes, buffers, views, message.body, message.end, codec, dictionaries)


def _ids(fields: Iterator[_Table], depth: int) -> Iterator[int]:
    if depth > 64:
        raise ValueError("nested deeper than 64 types")
    for each in fields:
        encoding = each.table(4)
        if encoding is not None:
            yield encoding.number(0, "q")
        yield from _ids(each.tables(5), depth + 1)
