"""Columns of a catalog: packed while they are built, and read-only arrays over the mapped file."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cachesvc.core.errors import CorruptData

Array = npt.NDArray[Any]
Ints = npt.NDArray[np.int64]
_DTYPES = {"<i8", "<i4", "|u1", "<f8"}


class TextColumn:
    """Strings packed as they come: 8 bytes a row beyond the text. Any str, surrogate escapes included."""

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self.text = bytearray()
        self.ends = array("q")
        self.extend(texts)

    def __len__(self) -> int:
        return len(self.ends)

    def __iter__(self) -> Iterator[str]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> str:
        begin = self.ends[index - 1] if index else 0
        return self.text[begin : self.ends[index]].decode("utf-8", "surrogateescape")

    def append(self, text: str) -> None:
        """Add a row."""
        self.text += text.encode("utf-8", "surrogateescape")
        self.ends.append(len(self.text))

    def extend(self, texts: Iterable[str]) -> None:
        """Add several rows."""
        for text in texts:
            self.append(text)

    def truncate(self, rows: int) -> None:
        """Drop all but the first rows."""
        del self.text[self.ends[rows - 1] if rows else 0 :]
        del self.ends[rows:]

    def columns(self, name: str) -> dict[str, Array]:
        """Return the two columns that `MappedTexts` reads."""
        return {f"{name}.text": np.frombuffer(self.text, np.uint8), f"{name}.end": ints(self.ends)}


def ints(values: Iterable[int]) -> Ints:
    """Return any run of integers as int64, an `array('q')` without a copy."""
    if isinstance(values, array):
        return np.frombuffer(values, np.int64) if len(values) else np.zeros(0, np.int64)
    return np.asarray(list(values), np.int64)


@dataclass(frozen=True, slots=True)
class MappedColumns:
    """The columns of an open catalog file: read-only arrays over its mapping.

    `head` is the JSON that was written with them. `data` is the mapped LMDB file, `places` the offset and length of
    each LMDB value in it. `joined` caches the arrays.
    """

    head: dict[str, Any]
    data: memoryview
    places: dict[str, tuple[int, int]]
    joined: dict[str, Array]

    def __contains__(self, name: str) -> bool:
        return name in self.head["columns"]

    def __getitem__(self, name: str) -> Array:
        """Return a column: a view of the mapping, or a copy where it takes several LMDB values.

        Raises CorruptData for a column that is absent or does not have the bytes that the head states.
        """
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
            begin, size = self.places.get(value_key(name, len(parts)), (0, 0))
            if not size:
                raise CorruptData(f"catalog column {name!r} ends at {length} bytes")
            parts.append(np.frombuffer(self.data[begin : begin + size], np.uint8))
            length += size
        if length != count * kind.itemsize:
            raise CorruptData(f"catalog column {name!r} has {length} bytes for {count} rows of {dtype}")
        whole = parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0, np.uint8), *parts])
        whole.flags.writeable = False
        return whole.view(kind)


def value_key(column: str, part: int) -> str:
    """Return the LMDB key of one part of a column."""
    return f"{column}/{part:06d}"


class MappedTexts:
    """The strings of two mapped columns."""

    def __init__(self, columns: MappedColumns, name: str) -> None:
        self._text = columns[f"{name}.text"]
        self._ends = columns[f"{name}.end"]

    def __len__(self) -> int:
        return len(self._ends)

    def __iter__(self) -> Iterator[str]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> str:
        begin = int(self._ends[index - 1]) if index else 0
        return self._text[begin : int(self._ends[index])].tobytes().decode("utf-8", "surrogateescape")


def check_ascending(values: Ints, name: str) -> None:
    """Raise CorruptData for a column that descends or begins below 0."""
    if len(values) and (values[0] < 0 or (values[1:] < values[:-1]).any()):
        raise CorruptData(f"catalog column {name!r} must ascend")
