"""The file of a catalog: named columns in an LMDB file, followed by an index of its values and a trailer.

LMDB writes the columns, and any LMDB tool can read them. The index holds the offset and length of every value, as LMDB
reported them when the file was written, so that a reader maps the file itself: arrays keep their mapping alive, survive
a fork, and one process may open a file twice, none of which an LMDB environment allows. The trailer holds the sizes
(checked at every open) and a digest (checked when the file comes from a place where others write).
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import lmdb
import numpy as np
import xxhash

from cachesvc.catalog.columns import Array, MappedColumns, value_key
from cachesvc.core.errors import CacheError, CorruptData, InvalidInput, OutOfSpace

_Places = dict[str, tuple[int, int]]
VALUE_BYTES = 1 << 30
"""The longest LMDB value that is written. LMDB's limit is 4 GiB, and writing needs a copy in memory. A column of several
values is joined by copying, so 1 GiB keeps a column of 134 million int64 a view."""
_TRAILER = struct.Struct("<8sQQ16s")
_MAGIC = b"CSCATLG2"
_HEAD = "head"
_HEAD_BYTES = 1 << 20
"""Limit of the head. Parsed, it takes up to 28 times as much memory in a daemon, for each catalog. It holds a name for
each field and column, and nothing for a sample or class."""
_INDEX_BYTES = 1 << 20
"""Limit of the index: a catalog has some 200 columns, and one more value for each GiB of a column."""


@contextmanager
def mapped_columns(path: str) -> Iterator[MappedColumns]:
    """Map a file for the block that reads its columns; they stay mapped after it.

    Raises CorruptData for anything but one whole file that `write_columns` wrote, and where the block fails on what the
    columns hold.
    """
    try:
        yield _map(path)
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


def _map(path: str) -> MappedColumns:
    whole, lmdb_bytes, index_bytes = _whole(path)
    data = whole[:lmdb_bytes]
    places = _places(whole[lmdb_bytes : lmdb_bytes + index_bytes], lmdb_bytes)
    if _HEAD not in places:
        raise CorruptData("the catalog's head is missing")
    begin, length = places[_HEAD]
    if length > _HEAD_BYTES:
        raise CorruptData(f"a head of {length:,} bytes; the limit is {_HEAD_BYTES:,}")
    head = json.loads(bytes(data[begin : begin + length]))
    return MappedColumns(head, data, places, {})


def _whole(path: str) -> tuple[memoryview, int, int]:
    """Map a file and return it with the sizes of its LMDB part and index, after comparing them with the file's size."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size <= _TRAILER.size:
            raise CorruptData(f"a file of {size} bytes is no catalog")
        whole = memoryview(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ))
    magic, lmdb_bytes, index_bytes, _ = _TRAILER.unpack_from(whole, size - _TRAILER.size)
    if magic != _MAGIC or lmdb_bytes + index_bytes + _TRAILER.size != size:
        raise CorruptData("no catalog's trailer at the end: truncated, or another kind of file")
    return whole, lmdb_bytes, index_bytes


def _places(raw: memoryview, lmdb_bytes: int) -> _Places:
    """Parse the index. Raises CorruptData for a value outside the LMDB file."""
    if len(raw) > _INDEX_BYTES:
        raise CorruptData(f"an index of {len(raw):,} bytes; the limit is {_INDEX_BYTES:,}")
    places = {key: (int(begin), int(length)) for key, (begin, length) in json.loads(bytes(raw)).items()}
    if any(begin < 0 or length < 0 or begin + length > lmdb_bytes for begin, length in places.values()):
        raise CorruptData("the catalog's index names a value outside the file")
    return places


def verify_digest(path: str) -> None:
    """Read a whole file and compare its digest. Raises CorruptData.

    The digest detects damage. It does not detect a forged file, which `check_catalog` does.
    """
    whole, lmdb_bytes, index_bytes = _whole(path)
    covered = lmdb_bytes + index_bytes
    if xxhash.xxh3_128_digest(whole[:covered]) != _TRAILER.unpack_from(whole, covered)[3]:
        raise CorruptData(f"{path}: the catalog's digest does not match; build it again")


def write_columns(
    path: str, head: Mapping[str, Any], columns: Mapping[str, Array], value_bytes: int = VALUE_BYTES
) -> None:
    """Write a file at `path`: temporary name beside it, fsync, rename. The same input gives the same bytes. No LMDB
    value is longer than `value_bytes`.

    Raises OutOfSpace where it cannot be written, InvalidInput where the head is too long.
    """
    whole = {**head, "columns": {name: (value.dtype.str, len(value)) for name, value in columns.items()}}
    text = json.dumps(whole, sort_keys=True).encode()
    if len(text) > _HEAD_BYTES:
        raise InvalidInput(
            f"the names of fields and tags take {len(text):,} bytes, and a catalog has {_HEAD_BYTES:,} for them: "
            "choose shorter or fewer ones"
        )
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        length, places = _write_lmdb(temporary, text, columns, value_bytes)
        _append_index(temporary, length, places)
        os.replace(temporary, path)
    except (lmdb.Error, OSError) as error:
        raise OutOfSpace(f"{path} cannot be written ({error}); {_advice(path, str(error))}") from error
    finally:
        with suppress(OSError):  # it was renamed, or its disk refuses removals as well
            os.unlink(temporary)


def _advice(path: str, message: str) -> str:
    """Say how to make a path writable; LMDB's errors have a text and no number."""
    folder = os.path.dirname(path)
    if not os.path.isdir(folder):
        return f"make the folder {folder} again, or start the daemon again"
    if any(os.strerror(code) in message for code in (errno.EROFS, errno.EACCES, errno.EPERM)):
        return f"make {folder} writable again, or use another folder"
    if os.strerror(errno.EIO) in message:
        return f"the disk of {folder} reports errors: look into dmesg, or use another folder"
    return "free space there"


def _write_lmdb(
    path: str, head: bytes, columns: Mapping[str, Array], value_bytes: int
) -> tuple[int, _Places]:
    """Write the LMDB file; return its size, and the offset and length of each value in it."""
    room = sum(value.nbytes + 4 * mmap.PAGESIZE for value in columns.values()) + 2 * len(head) + (1 << 20)
    env = lmdb.open(path, subdir=False, lock=False, sync=False, map_size=2 * room)
    try:
        for name, value in sorted(columns.items()):
            raw = np.ascontiguousarray(value).view(np.uint8)
            for part, begin in enumerate(range(0, len(raw), value_bytes)):
                with env.begin(write=True) as transaction:
                    transaction.put(value_key(name, part).encode(), raw[begin : begin + value_bytes].data)
        with env.begin(write=True) as transaction:
            transaction.put(_HEAD.encode(), head)
        return (env.info()["last_pgno"] + 1) * env.stat()["psize"], _value_places(env)
    finally:
        env.close()


def _value_places(env: lmdb.Environment) -> _Places:
    """Return the file offset and length of every value: the address at which LMDB maps it, less that of offset 0."""
    with env.begin(buffers=True) as transaction:
        values = {bytes(key).decode(): np.frombuffer(value, np.uint8) for key, value in transaction.cursor()}
        origin = _mapping_origin(values[_HEAD].ctypes.data)
        return {key: (value.ctypes.data - origin, len(value)) for key, value in values.items()}


def _mapping_origin(address: int) -> int:
    """Return the address at which this process maps offset 0 of the file that it maps at `address`."""
    with open("/proc/self/maps", "rb") as maps:
        for line in maps:  # 7f00-7fff r--s 00000000 08:02 4711 /path
            span, _, offset = line.split()[:3]
            low, high = (int(bound, 16) for bound in span.split(b"-"))
            if low <= address < high:
                return low - int(offset, 16)
    raise AssertionError("an address that LMDB handed out is not mapped")


def _append_index(path: str, lmdb_bytes: int, places: _Places) -> None:
    """Append the index and the trailer, and sync the file."""
    index = json.dumps(places, sort_keys=True).encode()
    with open(path, "r+b") as file:
        file.truncate(lmdb_bytes)
        file.seek(lmdb_bytes)
        file.write(index)
        file.flush()
        covered = lmdb_bytes + len(index)
        with mmap.mmap(file.fileno(), covered, access=mmap.ACCESS_READ) as data:
            digest = xxhash.xxh3_128_digest(data)
        file.write(_TRAILER.pack(_MAGIC, lmdb_bytes, len(index), digest))
        file.flush()
        os.fsync(file.fileno())
