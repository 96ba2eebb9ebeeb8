"""The catalog's file: named columns and a JSON head in one LMDB file, closed by a trailer.

LMDB writes it, and any LMDB tool reads it. We map it ourselves through `pages`: every offset is checked
before use, arrays own their mapping (none dangles), nothing must be opened anew after a fork, and one file
may be opened twice in a process. The trailer holds the size (checked at every open) and a digest (checked
when the file comes from where others write).
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import struct
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import lmdb
import numpy as np
import numpy.typing as npt
import xxhash

from cachesvc.catalog import pages
from cachesvc.core.errors import CacheError, CorruptData, InvalidInput, OutOfSpace

Array = npt.NDArray[Any]
Ints = npt.NDArray[np.int64]
_Made = TypeVar("_Made")
VALUE_BYTES = 1 << 30
"""Longest LMDB value. A value ends at 4 GiB and needs its length in memory when written; a column of more
than one value is joined by copying, so 1 GiB keeps 134 million rows a view."""
_TRAILER = struct.Struct("<8sQ16s")
_MAGIC = b"CSCATLG1"
_HEAD = b"head"
_HEAD_BYTES = 1 << 20
"""What a daemon keeps of it, for each catalog, is up to 28 times as much. It holds a name a field and column, nothing a
sample or class."""
_DTYPES = {"<i8", "<i4", "|u1", "<f8"}


class TextColumn:
    """Strings packed as they come: 8 bytes a row beyond the text. Any str, surrogate escapes included."""

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self.text = bytearray()
        self.ends = array("q")
        for text in texts:
            self.append(text)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> str:
        begin = self.ends[index - 1] if index else 0
        return self.text[begin : self.ends[index]].decode("utf-8", "surrogateescape")

    def append(self, text: str) -> None:
        """Add a row."""
        self.text += text.encode("utf-8", "surrogateescape")
        self.ends.append(len(self.text))

    def columns(self, name: str) -> dict[str, Array]:
        """The two columns that `Texts` reads."""
        return {f"{name}.text": np.frombuffer(self.text, np.uint8), f"{name}.end": ints(self.ends)}


class Texts:
    """Strings out of two mapped columns."""

    def __init__(self, columns: Columns, name: str) -> None:
        self._text = columns[f"{name}.text"]
        self._ends = columns[f"{name}.end"]

    def __len__(self) -> int:
        return len(self._ends)

    def __iter__(self) -> Iterator[str]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> str:
        begin = int(self._ends[index - 1]) if index else 0
        return self._text[begin : int(self._ends[index])].tobytes().decode("utf-8", "surrogateescape")


def ints(values: Iterable[int]) -> Ints:
    """Any run of integers as int64 (an `array('q')` without a copy)."""
    if isinstance(values, array):
        return np.frombuffer(values, np.int64) if len(values) else np.zeros(0, np.int64)
    return np.asarray(list(values), np.int64)


@dataclass(frozen=True, slots=True)
class Columns:
    """An open file. `head` is what was written as JSON; columns are read-only arrays over the mapping."""

    head: dict[str, Any]
    data: memoryview
    where: dict[bytes, tuple[int, int]]
    joined: dict[str, Array]

    def __contains__(self, name: str) -> bool:
        return name in self.head["columns"]

    def __getitem__(self, name: str) -> Array:
        """The column. Zero-copy up to `VALUE_BYTES`, joined once beyond."""
        if name not in self.joined:
            if name not in self:
                raise CorruptData(f"catalog has no column {name!r}")
            self.joined[name] = self._join(name)
        return self.joined[name]

    def _join(self, name: str) -> Array:
        dtype, count = self.head["columns"][name]
        if dtype not in _DTYPES:
            raise CorruptData(f"catalog column {name!r} has the unknown type {dtype!r}")
        kind = np.dtype(dtype)
        parts: list[Array] = []
        length = 0
        while length < count * kind.itemsize:
            begin, size = self.where.get(_key(name, len(parts)), (0, 0))
            if not size:
                raise CorruptData(f"catalog column {name!r} ends at {length} bytes")
            parts.append(np.frombuffer(self.data[begin : begin + size], np.uint8))
            length += size
        if length != count * kind.itemsize:
            raise CorruptData(f"catalog column {name!r} has {length} bytes for {count} rows of {dtype}")
        whole = parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0, np.uint8), *parts])
        whole.flags.writeable = False
        return whole.view(kind)


def _key(name: str, page: int) -> bytes:
    return f"{name}/{page:06d}".encode()


def read_columns(path: str, make: Callable[[Columns], _Made]) -> _Made:
    """Map a file and make something of its columns. Raises CorruptData for anything that is not one whole
    file that `write_columns` wrote."""
    try:
        return make(_map(path))
    except (
        ValueError,
        KeyError,
        TypeError,
        IndexError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as error:
        if isinstance(error, CacheError):
            raise
        raise CorruptData(f"{path} is no catalog: {error!r}; build it again") from error
    except CorruptData as error:
        raise CorruptData(f"{path}: {error}; build it again") from error


def _map(path: str) -> Columns:
    data = _whole(path)
    where = pages.values(data)
    if _HEAD not in where:
        raise CorruptData("the catalog's head is missing")
    begin, length = where[_HEAD]
    if length > _HEAD_BYTES:
        raise CorruptData(f"a head of {length:,} bytes; one of {_HEAD_BYTES:,} is read")
    head = json.loads(bytes(data[begin : begin + length]))
    return Columns(head, data, where, {})


def _whole(path: str) -> memoryview:
    """The LMDB part, after the trailer's size was checked."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size <= _TRAILER.size:
            raise CorruptData(f"a file of {size} bytes is no catalog")
        data = memoryview(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ))
    magic, length, _ = _TRAILER.unpack_from(data, size - _TRAILER.size)
    if magic != _MAGIC or length != size - _TRAILER.size:
        raise CorruptData("no catalog's trailer at the end: truncated, or another kind of file")
    return data[:length]


def verify_digest(path: str) -> None:
    """Read all of a file and compare its digest. Raises CorruptData. Catches damage, not malice: a reader
    must survive a forged file, and does."""
    data = _whole(path)
    with open(path, "rb") as file:
        file.seek(len(data))
        digest = _TRAILER.unpack(file.read(_TRAILER.size))[2]
    if xxhash.xxh3_128_digest(data) != digest:
        raise CorruptData(f"{path}: the catalog's digest does not match; build it again")


def write_columns(path: str, head: Mapping[str, Any], columns: Mapping[str, Array]) -> None:
    """Write a file at `path`: temporary name beside it, fsync, rename. The same input gives the same
    bytes. Raises OutOfSpace where it cannot be written, InvalidInput where the head is too long."""
    whole = {**head, "columns": {name: (value.dtype.str, len(value)) for name, value in columns.items()}}
    text = json.dumps(whole, sort_keys=True).encode()
    if len(text) > _HEAD_BYTES:
        raise InvalidInput(
            f"the names of fields and tags take {len(text):,} bytes, and a catalog has {_HEAD_BYTES:,} for them: "
            "choose shorter or fewer ones"
        )
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        _write(temporary, text, columns)
        os.replace(temporary, path)
    except (lmdb.Error, OSError) as error:
        raise OutOfSpace(f"{path} cannot be written ({error}); {_mend(path, str(error))}") from error
    finally:
        with suppress(OSError):  # it was renamed, or its disk takes no removal either
            os.unlink(temporary)


def _mend(path: str, said: str) -> str:
    """What to do about a file that cannot be written; LMDB's errors have a text and no number."""
    folder = os.path.dirname(path)
    if not os.path.isdir(folder):
        return f"make the folder {folder} again, or start the daemon again"
    if any(os.strerror(code) in said for code in (errno.EROFS, errno.EACCES, errno.EPERM)):
        return f"make {folder} writable again, or use another folder"
    if os.strerror(errno.EIO) in said:
        return f"the disk of {folder} reports errors: look into dmesg, or use another folder"
    return "free space there"


def _write(path: str, head: bytes, columns: Mapping[str, Array]) -> None:
    room = sum(value.nbytes + 4 * mmap.PAGESIZE for value in columns.values()) + 2 * len(head) + (1 << 20)
    env = lmdb.open(path, subdir=False, lock=False, sync=False, map_size=2 * room)
    try:
        for name, value in sorted(columns.items()):
            raw = np.ascontiguousarray(value).view(np.uint8)
            for page, begin in enumerate(range(0, len(raw), VALUE_BYTES)):
                with env.begin(write=True) as transaction:
                    transaction.put(_key(name, page), raw[begin : begin + VALUE_BYTES].data)
        with env.begin(write=True) as transaction:
            transaction.put(_HEAD, head)
        length = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
    finally:
        env.close()
    _seal(path, length)


def _seal(path: str, length: int) -> None:
    with open(path, "r+b") as file:
        file.truncate(length)
        with mmap.mmap(file.fileno(), length, access=mmap.ACCESS_READ) as data:
            digest = xxhash.xxh3_128_digest(data)
        file.seek(length)
        file.write(_TRAILER.pack(_MAGIC, length, digest))
        file.flush()
        os.fsync(file.fileno())
