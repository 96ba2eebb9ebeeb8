"""litData's binary form of lists and dicts, byte by byte. `tests/compat/test_litdata.py` reads what litData writes."""

from __future__ import annotations

import json
import struct
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loader.datasets.decoding.litdata_values import decode_nested

pytestmark = pytest.mark.pure


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<I", len(raw)) + raw


def head(tag: int, count: int) -> bytes:
    return struct.pack("<BI", tag, count)


VALUES: list[tuple[bytes, Any]] = [
    (b'[1, "a"]', [1, "a"]),
    (b'{"a": null}', {"a": None}),
    (head(0, 6) + b"[1,{}]", [1, {}]),
    (head(1, 2) + text("a") + text("é"), ["a", "é"]),
    (head(1, 0), []),
    (head(2, 2) + struct.pack("<2q", -1, 1 << 40), [-1, 1 << 40]),
    (head(3, 1) + struct.pack("<d", 0.5), [0.5]),
    (head(4, 3) + b"\1\0\1", [True, False, True]),
    (head(5, 2) + text("x") + b"\7" + text("y") + text("z") + b"\x0b", {"x": "y", "z": None}),
    (b"\x08" + struct.pack("<q", -7), -7),
    (b"\x09" + struct.pack("<d", 1.5), 1.5),
    (b"\x0a\1", True),
    (
        head(6, 2) + struct.pack("<I", 2) + text("k") + text("v")
        + b"\x11" + text("a") + b"\x12" + struct.pack("<q", 1)
        + b"\x10" + b"\x14\0",
        [{"k": "a", "v": 1}, {"k": None, "v": False}],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("raw", "value"), VALUES)
def test_values_of_every_tag(raw: bytes, value: Any) -> None:
    assert decode_nested(raw) == value
    assert json.dumps(decode_nested(raw)) == json.dumps(value), "of the same types"


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\x0c",
        head(1, 1 << 31),
        head(2, 1 << 31),
        head(4, 1) + b"\1\1",
        head(6, 1 << 31) + struct.pack("<I", 0),
        head(6, 1) + struct.pack("<I", 1) + text("k") + b"\7",
    ],
)
def test_bytes_that_are_no_value_are_an_error(raw: bytes) -> None:
    with pytest.raises(ValueError, match=r"tag of litData|ends early|follows it|no keys"):
        decode_nested(raw)


@given(st.binary(max_size=60))
def test_no_bytes_hang_or_take_much_memory(raw: bytes) -> None:
    with suppress(ValueError, RecursionError):
        decode_nested(raw)
