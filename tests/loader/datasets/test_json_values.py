"""JSON of any kind: lines that are no objects, and columns of Arrow's type for JSON in Parquet and Arrow files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc as ipc
import pyarrow.parquet as pq
import pytest

from cachesvc.core.errors import CorruptData, InvalidInput
from loader import DataLoader, open_dataset

MIXED: list[Any] = [{"a": 1, "b": [1, "x"]}, [1, 2], "text", None, 2**70, 0.5, {}, "null"]


@pytest.mark.parametrize(
    "rows", [[[1, 2], [3]], ["a", "b"], [1, 2.5], [{}, {}], [None, None], MIXED], ids=str
)
def test_lines_of_json_need_not_be_objects(tmp_path: Path, rows: list[Any]) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = open_dataset(tmp_path)
    assert [dataset[at] for at in range(len(dataset))] == rows
    batches = DataLoader(dataset, batch_size=len(rows), collate_fn=list)
    assert list(batches) == [rows]


def test_an_empty_choice_of_fields_is_refused_for_lines_without_fields(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("[1]\n[2]\n")
    with pytest.raises(InvalidInput, match="fields"):
        open_dataset(tmp_path, fields=())
    assert open_dataset(tmp_path, fields="key")[1] == "a.jsonl:1"


def of_json(texts: list[Any]) -> Any:
    return pa.ExtensionArray.from_storage(pa.json_(), pa.array(texts, pa.string()))


def write(path: Path, table: pa.Table) -> None:
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    else:
        with ipc.new_file(path, table.schema) as file:
            file.write_table(table)


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_columns_of_json_are_the_values_of_their_texts(tmp_path: Path, name: str) -> None:
    texts = [*map(json.dumps, MIXED)]
    lists = pa.ListArray.from_arrays([0, 2, 2, *range(3, len(texts) + 2)], of_json([None, *texts]))
    table = pa.table({"j": of_json(texts), "l": lists.slice(0, len(MIXED))})
    table = table.append_column("s", pa.StructArray.from_arrays([of_json(texts)], ["k"]))
    write(tmp_path / name, table)
    dataset = open_dataset(tmp_path)
    found = [dataset[at] for at in range(len(dataset))]
    assert [row["j"] for row in found] == MIXED
    assert [row["s"] for row in found] == [{"k": value} for value in MIXED]
    values = [None, *MIXED]
    assert [row["l"] for row in found] == [values[:2], [], *([value] for value in values[2 : len(MIXED)])]
    assert [
        row[0] for row in map(open_dataset(tmp_path, fields=["j"], decode=None).__getitem__, range(8))
    ] == [text.encode() for text in texts]


@pytest.mark.parametrize("nested", [False, True])
def test_json_that_repeats_in_parquet_takes_the_room_of_its_dictionary(tmp_path: Path, nested: bool) -> None:
    value = {"name": "get_weather", "arguments": {"city": "Paris " * 40}}
    column = of_json([json.dumps(value)] * 5000)
    if nested:
        column = pa.ListArray.from_arrays(list(range(5001)), column)
    pq.write_table(pa.table({"j": column}), tmp_path / "a.parquet", row_group_size=2000)
    dataset = open_dataset(tmp_path)
    assert dataset.take(4999)[4998] == dataset[0] == ([value] if nested else value)
    assert dataset.catalog.extent_sizes.sum() < 200_000


def test_hugging_faces_features_decide_what_json_is(tmp_path: Path) -> None:
    for decode in (True, False):
        info = {"info": {"features": {"j": {"_type": "Json", "decode": decode}}}}
        schema = pa.schema([("j", pa.string())], {"huggingface": json.dumps(info)})
        pq.write_table(pa.table({"j": ['{"a": 1}']}, schema), tmp_path / f"{decode}.parquet")
        assert open_dataset(tmp_path / f"{decode}.parquet")[0] == ({"a": 1} if decode else '{"a": 1}')


def test_text_that_is_no_json_is_named_by_its_sample(tmp_path: Path) -> None:
    pq.write_table(pa.table({"j": of_json(["1", "{"])}), tmp_path / "a.parquet")
    dataset = open_dataset(tmp_path)
    assert dataset[0] == 1
    for read in (lambda: dataset[1], lambda: list(DataLoader(dataset, batch_size=2))):
        with pytest.raises(CorruptData, match=r"a\.parquet:1"):
            read()
