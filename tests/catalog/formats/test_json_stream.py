"""Long JSON is parsed a value at a time: the values equal those of Python's parser, and little memory is used."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachesvc.catalog.parsing.json_index import JsonStream
from cachesvc.core.errors import CorruptData

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
    max_leaves=8,
)


def scanned(raw: bytes, window_bytes: int = 7, value_chars: int = 10_000) -> dict[str, Any]:
    """Return all fields, with lists read an item at a time."""

    def read(offset: int, length: int) -> bytes:
        assert 0 < length <= window_bytes
        return raw[offset : offset + length]

    stream = JsonStream("x.json", read, len(raw), window_bytes, value_chars)
    return {
        name: list(stream.items()) if name.startswith("l") else stream.value() for name in stream.fields()
    }


names = st.text(max_size=9).filter(lambda name: not name.startswith("l"))


@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(names, json_values, max_size=4),
    st.lists(json_values, max_size=5),
    st.sampled_from([None, 1, "\t"]),
    st.booleans(),
    st.integers(1, 40),
)
def test_values_equal_those_of_pythons_parser(
    fields: dict[str, Any], items: list[Any], indent: int | str | None, ascii_only: bool, window_bytes: int
) -> None:
    whole = {**fields, "list": items, **fields}
    raw = json.dumps(whole, indent=indent, ensure_ascii=ascii_only).encode()
    assert scanned(raw, window_bytes) == whole
    assert scanned(b"\xef\xbb\xbf" + raw + b" \n", window_bytes) == whole


@pytest.mark.parametrize(
    "broken",
    [
        b"", b" ", b"[]", b"{", b'{"a"', b'{"a":', b'{"a" 1}', b'{"a": 1', b'{"a": 1,', b'{"a": 1,}', b'{"a": 1]',
        b'{"a": 1} x', b"{1: 1}", b'{"list": {}}', b'{"list": [1', b'{"list": [1,]}', b'{"list": [1 2]}',
        b'{"list": [1}', b'{"a": "\xff"}', b'{"a": "\xc3', b'{"a": tru}', b'{"a": ' + b"9" * 9_000 + b"}",
    ],
)  # fmt: skip
def test_an_error_names_the_place(broken: bytes) -> None:
    with pytest.raises(CorruptData, match=r"x\.json is broken at character \d+: "):
        scanned(broken)


def test_the_place_counts_from_the_beginning_of_the_file() -> None:
    with pytest.raises(CorruptData, match=r"at character 1,011: Expecting value"):
        scanned(b'{"list": [' + b"1," * 500 + b" ?]}", value_chars=20)


@pytest.mark.parametrize("value", [b'"' + b"x" * 98 + b'"', b"[" + b"1," * 48 + b"1]", b"1" * 100])
def test_the_limit_of_a_value_is_the_same_for_any_window(value: bytes) -> None:
    for window_bytes in range(1, 300):
        for lead in (b"", b" " * 70):
            raw = b'{"list": [' + lead + value + b"]}"
            assert scanned(raw, window_bytes, len(value) + 1) == json.loads(raw)
            with pytest.raises(CorruptData, match=r"\d+ characters or more"):
                scanned(raw, window_bytes, len(value))
