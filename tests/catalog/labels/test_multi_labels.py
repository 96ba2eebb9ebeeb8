"""Labels of several values: sets of classes and vectors of targets, as loss functions take them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cachesvc.catalog.labels.label_encoding import ABSENT, encode_columns, encode_lists
from cachesvc.core.errors import InvalidInput
from loader import DataLoader, open_dataset
from tests.support.datasets import write_files

pytestmark = pytest.mark.usefixtures("direct")
FILES = {f"{n}.jpg": bytes([n]) * 9 for n in range(3)}
LISTS = st.lists(st.none() | st.lists(st.text("abcé", max_size=3), max_size=4), max_size=6)


def opened(root: Path, name: str, table: str, labels: Any = "") -> Any:
    write_files(root, FILES | {name: table.encode()})
    return open_dataset(root, labels=labels, decode=None)


def by_key(data: Any) -> list[list[float]]:
    rows = {data.catalog.key(n): data[n][1].tolist() for n in range(len(data))}
    return [rows[key] for key in sorted(rows)]


def jsonl(*labels: Any) -> str:
    return "".join(
        json.dumps({"file_name": f"{n}.jpg", "label": label}) + "\n" for n, label in enumerate(labels)
    )


def test_lists_of_names_are_rows_of_classes(tmp_path: Path) -> None:
    data = opened(tmp_path, "metadata.jsonl", jsonl(["dog", "cat"], [], "cat"))
    assert data.classes == ("cat", "dog")
    assert by_key(data) == [[1, 1], [0, 0], [1, 0]]
    (batch,) = DataLoader(data, 3, collate_fn=lambda rows: torch.stack([label for _, label in rows]))
    assert (batch.dtype, batch.shape) == (torch.float32, (3, 2))


def test_a_separator_divides_a_cell_into_classes(tmp_path: Path) -> None:
    table = "image_name,tags\n0,clear primary\n1,haze\n"
    data = opened(tmp_path, "train.csv", table, {"file": "image_name", "target": "tags", "separator": " "})
    assert data.classes == ("clear", "haze", "primary")
    assert by_key(data)[:2] == [[1, 0, 1], [0, 1, 0]]
    assert all(math.isnan(cell) for cell in by_key(data)[2])
    assert any(
        "1 of 3 samples have no label, '2.jpg' is the first: their label is all nan" in n
        for n in data.catalog.notes
    )


def test_several_columns_are_a_vector(tmp_path: Path) -> None:
    table = "image,x,y,note\n0.jpg,1.5,True,a\n1.jpg,-2,0,b\n2.jpg,,1e3,c\n"
    data = opened(tmp_path, "points.csv", table, {"target": ["x", "y"]})
    assert data.classes == ("x", "y")
    assert by_key(data)[:2] == [[1.5, 1], [-2, 0]]
    assert math.isnan(by_key(data)[2][0])
    assert by_key(data)[2][1] == 1000
    assert len(data.where("x > 0")) == 1
    with pytest.raises(InvalidInput, match=r"'[abc]' in the column 'note', which is no number"):
        open_dataset(tmp_path, labels={"target": ["x", "note"]})


def test_lists_of_fractions_are_vectors_and_of_whole_numbers_classes(tmp_path: Path) -> None:
    assert by_key(opened(tmp_path / "a", "m.jsonl", jsonl([0.5, 1], [1, 2], [3, 4]))) == [
        [0.5, 1],
        [1, 2],
        [3, 4],
    ]
    assert by_key(opened(tmp_path / "b", "m.jsonl", jsonl([0, 2], [1], [2]))) == [
        [1, 0, 1],
        [0, 1, 0],
        [0, 0, 1],
    ]
    boxes = opened(tmp_path / "c", "m.jsonl", jsonl([1, 2], [3, 4], [5, 6]), "float")
    assert by_key(boxes) == [[1, 2], [3, 4], [5, 6]]
    with pytest.raises(InvalidInput, match="lists of 1 and of 2 numbers"):
        opened(tmp_path / "d", "m.jsonl", jsonl([0.5], [1, 2], [3]))
    with pytest.raises(InvalidInput, match="give texts or numbers"):
        opened(tmp_path / "e", "m.jsonl", jsonl([{"a": 1}], [], []))


def test_too_many_cells_are_refused_before_memory_is_taken() -> None:
    with pytest.raises(InvalidInput, match="100,000 classes or targets"):
        encode_lists([[str(n) for n in range(100_000)]] + [None] * 20_000, "", "u")


@given(LISTS)
def test_each_class_of_a_list_is_marked_and_no_other(lists: list[Any]) -> None:
    classes, found = encode_lists(lists, "class", "u")
    assert found.shape == (len(lists), len(classes))
    for row, wanted in zip(found, lists, strict=True):
        if wanted is None:
            assert (row == ABSENT).all()
        else:
            assert set(np.flatnonzero(row)) == {classes.index(value) for value in wanted}


@given(
    st.lists(
        st.none() | st.lists(st.floats(allow_nan=True) | st.booleans() | st.none(), min_size=2, max_size=2)
    )
)
def test_columns_keep_their_numbers(rows: list[Any]) -> None:
    _, found = encode_columns(rows, ("a", "b"), "u")
    for row, wanted in zip(found, rows, strict=True):
        cells = [math.nan if value is None else float(value) for value in wanted or (None, None)]
        assert np.array_equal(row, cells, equal_nan=True)
