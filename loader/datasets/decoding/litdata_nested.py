"""Decodes litData's binary form of lists and dicts: a tag, and what follows it. See `_nested_dumps` of its
`streaming/serializers.py`."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

_TOO_SHORT = "it ends early"


def decode_nested(raw: bytes) -> Any:
    """Return the value. Raises ValueError, RecursionError for bytes that are no such value."""
    if raw[:1] in (b"[", b"{"):  # of earlier releases
        return json.loads(raw)
    cursor = _Cursor(raw)
    found = _value(cursor)
    if cursor.at != len(raw):
        raise ValueError("something follows it")
    return found


class _Cursor:
    def __init__(self, raw: bytes) -> None:
        self._raw, self.at = raw, 0

    def take(self, count: int) -> bytes:
        if self.at + count > len(self._raw):
            raise ValueError(_TOO_SHORT)
        self.at += count
        return self._raw[self.at - count : self.at]

    def number(self, form: str) -> Any:
        (found,) = struct.unpack(form, self.take(struct.calcsize(form)))
        return found

    def count(self) -> int:
        found: int = self.number("<I")
        return found

    def text(self) -> str:
        return self.take(self.count()).decode()


def _value(cursor: _Cursor) -> Any:
    return _by_tag(_VALUES, cursor)


def _by_tag(readers: dict[int, Callable[[_Cursor], Any]], cursor: _Cursor) -> Any:
    tag = cursor.take(1)[0]
    if tag not in readers:
        raise ValueError(f"{tag} is no tag of litData")
    return readers[tag](cursor)


def _array(kind: str) -> Callable[[_Cursor], Any]:
    size = np.dtype(kind).itemsize
    return lambda cursor: np.frombuffer(cursor.take(size * cursor.count()), kind).tolist()


def _dict(cursor: _Cursor) -> dict[str, Any]:
    return {cursor.text(): _value(cursor) for _ in range(cursor.count())}


def _records(cursor: _Cursor) -> list[dict[str, Any]]:
    """Dicts that have the same keys, which are written once."""
    rows, names = cursor.count(), cursor.count()
    keys = [cursor.text() for _ in range(names)]
    if not keys:
        raise ValueError("its records have no keys")
    return [{key: _by_tag(_FIELDS, cursor) for key in keys} for _ in range(rows)]


_PLAIN: tuple[Callable[[_Cursor], Any], ...] = (
    _Cursor.text,
    lambda cursor: cursor.number("<q"),
    lambda cursor: cursor.number("<d"),
    lambda cursor: cursor.take(1) != b"\0",
)
_VALUES: dict[int, Callable[[_Cursor], Any]] = {
    0: lambda cursor: json.loads(cursor.take(cursor.count())),
    1: lambda cursor: [cursor.text() for _ in range(cursor.count())],
    2: _array("<i8"),
    3: _array("<f8"),
    4: _array("?"),
    5: _dict,
    6: _records,
    **dict(enumerate(_PLAIN, 7)),
    11: lambda _: None,
}
_FIELDS: dict[int, Callable[[_Cursor], Any]] = {0x10: lambda _: None, **dict(enumerate(_PLAIN, 0x11))}
