"""Samples of rows of text: their types in batches, and what becomes of rows that do not parse."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from cachesvc.core.errors import CorruptData, InvalidInput
from loader import DataLoader, open_dataset
from tests.support.datasets import write_files


def test_fields_make_tuples(tmp_path: Path) -> None:
    write_files(tmp_path, {"a.jsonl": b'{"a": 1, "b": [2]}\n{"b": null}\n[1]\n', "a.csv": b"a,b\n1,x\n,y\n"})
    rows = open_dataset(tmp_path / "a.jsonl", fields=("b", "a"))
    assert [rows[0], rows[1]] == [([2], 1), (None, None)]
    with pytest.raises(CorruptData, match=r"a\.jsonl line 3 is list and no object, which fields= needs"):
        rows[2]
    assert list(open_dataset(tmp_path / "a.csv", fields=("a",))) == [(1,), (None,)]
    with pytest.raises(InvalidInput, match="fields \\['c'\\] are not in the dataset, which has a, b"):
        open_dataset(tmp_path / "a.csv", fields="c")


def test_rows_that_are_not_decoded_are_bytes(tmp_path: Path) -> None:
    write_files(tmp_path, {"a.jsonl": b'{"a": 1}\r\n[2]\n'})
    assert list(open_dataset(tmp_path / "a.jsonl", decode=None)) == [b'{"a": 1}', b"[2]"]
    assert list(open_dataset(tmp_path / "a.jsonl", decode=len)) == [8, 3]
    with pytest.raises(InvalidInput, match="which has row"):
        open_dataset(tmp_path / "a.jsonl", decode=None, fields="a")


def test_a_column_that_a_file_lacks_is_none(tmp_path: Path) -> None:
    write_files(tmp_path / "d", {"0.csv": b"a,b\n1,x\n", "1.csv": b"c,a\n2.5,3\n"})
    rows = open_dataset(tmp_path / "d")
    assert list(rows) == [{"a": 1, "b": "x", "c": None}, {"a": 3, "b": None, "c": 2.5}]
    assert list(rows.where("c > 2")) == [{"a": 3, "b": None, "c": 2.5}]


@pytest.mark.parametrize(
    ("name", "body", "says"),
    [
        (
            "a.jsonl",
            b'{"n": 0}\n\n{"n": 1\n{"n": 2}\n',
            r"a\.jsonl line 3 is no JSON: Expecting ',' delimiter",
        ),
        ("a.csv", b"n,m\n0,0\n1\n2,2\n", r"a\.csv line 3 has 1 cells, its header 2; repair it"),
        ("a.csv", b'n,m\n0,0\n1,"x"y\n2,2\n', r"a\.csv line 3 is no CSV: ',' expected"),
        (
            "a.csv.gz",
            gzip.compress(b"n,m\n0,0\n1,\xff\n2,2\n", mtime=0),
            r"a\.csv\.gz line 3 is no UTF-8 text",
        ),
    ],
)
def test_a_malformed_row_is_named_and_can_be_skipped(
    tmp_path: Path, name: str, body: bytes, says: str
) -> None:
    write_files(tmp_path, {name: body})
    rows = open_dataset(tmp_path / name)
    with pytest.raises(CorruptData, match=says):
        rows[1]
    with pytest.raises(CorruptData, match=says):
        list(DataLoader(rows, 3, collate_fn=list))
    batches = DataLoader(rows, 3, collate_fn=list, on_error="skip")
    assert [row["n"] for batch in batches for row in batch] == [0, 2]
    assert batches.bad_samples[0].key == f"{name}:1"


@pytest.mark.parametrize(("name", "body"), [("a.jsonl", b'{"a": "x", "b": 1}\n'), ("a.csv", b"a,b\nx,1\n")])
def test_one_field_that_is_named_alone_is_its_value(tmp_path: Path, name: str, body: bytes) -> None:
    write_files(tmp_path, {name: body})
    assert [*open_dataset(tmp_path / name, fields="a")] == ["x"]
    assert [*open_dataset(tmp_path / name, fields=("a",))] == [("x",)]
