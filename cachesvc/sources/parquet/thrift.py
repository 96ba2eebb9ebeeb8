"""Thrift's compact protocol: the numbers, lists and structs that are wanted, as {field id: value}; all else is skipped.

For footers of Parquet: pyarrow ends the process over statistics in them that do not fit the schema. And for the headers of
its pages. What pyarrow would read otherwise than this (a field twice or of another type, numbers that wrap) is refused:
it reads after what this says was checked.
https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Wanted = Mapping[int, "Wanted | int"]
"""Field ids of a struct; of those that are structs, or lists, what is wanted in them, of numbers their type."""
_DEPTH = 32
_STRUCT_BYTES = 12
"""On average no struct that is wanted takes less: a column chunk has two, of 26 bytes at least. What takes less is made
up, and a reader makes 750 bytes of each."""
_FIRST_BYTES = 4096
"""Of which that is not asked."""
_VARINT_BYTES = 10
_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(1, 13)
FLAG, I32, I64 = _TRUE, _I32, _I64
_NUMBERS = {_I16: 16, _I32: 32, _I64: 64}
"""Their bits."""


def read_struct(data: bytes | memoryview, wanted: Wanted) -> tuple[dict[int, Any], int]:
    """The struct that `data` begins with, and the bytes that it takes. Raises ValueError for what is none."""
    reader = _Reader(memoryview(data))
    try:
        return reader.struct(_DEPTH, wanted), reader.at
    except IndexError:
        raise ValueError("a struct ends before its end") from None


def varint(data: memoryview, at: int) -> tuple[int, int]:
    """The number without sign that stands at `at`, and where it ends. Raises ValueError for what is none."""
    reader = _Reader(data, at)
    try:
        return reader.varint(), reader.at
    except IndexError:
        raise ValueError("a number ends before its end") from None


class _Reader:
    def __init__(self, data: memoryview, at: int = 0) -> None:
        self._data, self.at = data, at
        self._structs = 0

    def struct(self, depth: int, wanted: Wanted | None) -> dict[int, Any]:
        found: dict[int, Any] = {}
        field = 0
        self._structs += wanted is not None
        if self._structs * _STRUCT_BYTES > self.at + _FIRST_BYTES:
            raise ValueError("there are more structs than so many bytes hold")
        while head := self._byte():
            field = field + (head >> 4) if head >> 4 else self._number(16)
            kind = head & 15
            asked = wanted.get(field) if wanted is not None else None
            inside = None if isinstance(asked, int) else asked
            flag = kind in (_TRUE, _FALSE)
            value = kind == _TRUE if flag else self._value(kind, depth, inside)
            other = isinstance(asked, int) and asked != (FLAG if flag else kind)
            if not 0 < field < 1 << 15 or field in found or other:
                raise ValueError(f"a struct has field {field} twice, or of another type")
            if asked is not None:
                found[field] = value
        return found

    def _value(self, kind: int, depth: int, wanted: Wanted | None) -> Any:
        """The value; None for bytes and for a list or map that is not wanted."""
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        if kind == _BINARY:
            return self._skip(self.varint())
        if kind in (_TRUE, _FALSE, _BYTE):  # booleans in lists are bytes
            return self._byte()
        if kind == _DOUBLE:
            return self._skip(8)
        if not depth:
            raise ValueError("structs lie too deep in each other")
        if kind == _STRUCT:
            return self.struct(depth - 1, wanted)
        if kind in (_LIST, _SET):
            head = self._byte()
            count = self._count(head >> 4 if head >> 4 < 15 else self.varint())
            if wanted is not None:
                return [self._value(head & 15, depth - 1, wanted) for _ in range(count)]
            for _ in range(count):
                self._value(head & 15, depth - 1, None)
            return None
        if kind == _MAP:
            count = self._count(self.varint())
            kinds = self._byte() if count else 0
            for _ in range(count):
                self._value(kinds >> 4, depth - 1, None)
                self._value(kinds & 15, depth - 1, None)
            return None
        raise ValueError(f"there is no type {kind}")

    def _count(self, count: int) -> int:
        """Of items, each of which takes a byte at least."""
        if count > len(self._data) - self.at:
            raise ValueError("a list is longer than what is left")
        return count

    def _skip(self, count: int) -> None:
        self.at += self._count(count)

    def _number(self, bits: int) -> int:
        value = self.varint()
        if value >> bits:
            raise ValueError(f"a number has more than {bits} bits")
        return (value >> 1) ^ -(value & 1)

    def varint(self) -> int:
        """The next number without sign."""
        value = 0
        for shift in range(0, 7 * _VARINT_BYTES, 7):
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise ValueError("a number has no end")

    def _byte(self) -> int:
        self.at += 1
        return self._data[self.at - 1]
