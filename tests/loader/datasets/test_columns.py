"""Batches and values of columns, of Parquet and Arrow: what torch makes of rows, and what Python does not hold."""

from __future__ import annotations

import io
import json
from datetime import date, datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from pyarrow import feather
from torch.utils.data import default_collate

from cachesvc.core.errors import CorruptData, InvalidInput
from loader import DataLoader, open_dataset
from tests.support.datasets import write_files


def same(one: Any, other: Any) -> None:
    """Assert that two batches are equal in values and types."""
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert list(one) == list(other)
        for name in one:
            same(one[name], other[name])
    elif isinstance(one, (list, tuple)):
        for each, right in zip(one, other, strict=True):
            same(each, right)
    elif isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert torch.equal(one, other)
    else:
        assert one == other


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_is_what_torch_makes_of_its_rows(tmp_path: Path, workers: int) -> None:
    columns = {
        "i": pa.array(range(40), pa.int8()),
        "u": pa.array(range(40), pa.uint64()),
        "f": pa.array([n / 8 for n in range(40)], pa.float32()),
        "b": [n % 3 == 0 for n in range(40)],
        "text": [f"{n}" for n in range(40)],
        "raw": [bytes([n]) for n in range(40)],
        "ids": pa.array([[n, n + 1] for n in range(40)], pa.list_(pa.int16())),
        "pair": pa.array([[n / 2, 1.0] for n in range(40)], pa.list_(pa.float32(), 2)),
        "flags": pa.array([[True, n % 2 == 0] for n in range(40)]),
        "in": [{"x": n, "y": f"{n}"} for n in range(40)],
        "words": [["a", f"{n}"] for n in range(40)],
    }
    pq.write_table(pa.table(columns), tmp_path / "0.parquet")
    dataset = open_dataset(tmp_path)
    for number, batch in enumerate(DataLoader(dataset, 10, num_workers=workers)):
        same(batch, default_collate([dataset[n] for n in range(10 * number, 10 * number + 10)]))
    few = open_dataset(tmp_path, fields=("f", "text", "i"))
    same(next(iter(DataLoader(few, 10))), default_collate([few[n] for n in range(10)]))


@pytest.mark.parametrize("fields", [None, ("text", "n"), "text", ("text",)], ids=str)
@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.jsonl", "a.parquet", "a.arrow"])
def test_a_batch_of_texts_and_numbers_is_what_torch_makes_of_its_rows(
    tmp_path: Path, name: str, fields: Any
) -> None:
    rows = [{"text": f"t{n}", "n": n} for n in range(4)]
    if name == "a.parquet":
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / name)
    elif name == "a.arrow":
        feather.write_feather(pa.Table.from_pylist(rows), str(tmp_path / name))
    else:
        separator = "\t" if name == "a.tsv" else ","
        lines = [[f"t{n}", str(n)] for n in range(4)]
        written = [json.dumps(row) for row in rows]
        if name != "a.jsonl":
            written = [separator.join(line) for line in [["text", "n"], *lines]]
        write_files(tmp_path, {name: "\n".join([*written, ""]).encode()})
    data = open_dataset(tmp_path / name, fields=fields)
    for workers in (0, 1):
        (batch,) = DataLoader(data, 4, num_workers=workers)
        same(batch, default_collate([data[n] for n in range(4)]))


def test_a_batch_that_cannot_be_made_says_why(tmp_path: Path) -> None:
    columns = {"some": [1, None], "uneven": [[1], [1, 2]], "large": pa.array([2**64 - 1, 0], pa.uint64())}
    pq.write_table(pa.table(columns), tmp_path / "0.parquet")
    for name, words in (("some", "have some"), ("uneven", "differ"), ("large", "18446744073709551615")):
        with pytest.raises(InvalidInput, match=words):
            next(iter(DataLoader(open_dataset(tmp_path, fields=name), 2)))


def test_text_that_is_not_utf_8_names_its_row(tmp_path: Path) -> None:
    raw = pa.array([b"a", b"\xff", b"c"]).cast(pa.binary())
    bad = pa.Array.from_buffers(pa.string(), 3, raw.buffers())
    pq.write_table(pa.table({"x": bad}), tmp_path / "0.parquet")
    dataset = open_dataset(tmp_path)
    assert dataset[2] == "c"
    with pytest.raises(CorruptData, match=r"0\.parquet:1 in .* does not decode"):
        next(iter(DataLoader(dataset, 3)))
    batches = DataLoader(dataset, 3, on_error="skip")
    assert (list(batches), batches.bad_samples[0].key) == ([["a", "c"]], "0.parquet:1")


def test_what_python_does_not_hold_is_numpys(tmp_path: Path) -> None:
    columns = {
        "ns": pa.array([1_500, 1_000], pa.timestamp("ns")),
        "far": pa.array([10**15, 0], pa.timestamp("s")),
        "day": pa.array([10**8, 0], pa.date32()),
        "zone": pa.array([0, 3600], pa.timestamp("s", "+05:30")),
    }
    pq.write_table(pa.table(columns), tmp_path / "0.parquet", version="2.6")
    first, second = open_dataset(tmp_path, fields=("ns", "far", "day", "zone"))
    assert first[:3] == (
        np.datetime64(1500, "ns"),
        np.datetime64(10**15, "s"),
        np.datetime64(10**8, "D"),
    )
    assert second[:3] == (datetime(1970, 1, 1, 0, 0, 0, 1), datetime(1970, 1, 1), date(1970, 1, 1))
    assert (second[3].isoformat(), first[3]) == (
        "1970-01-01T06:30:00+05:30",
        datetime(1970, 1, 1, tzinfo=timezone.utc),
    )


def picture(colour: int) -> bytes:
    from PIL import Image

    body = io.BytesIO()
    Image.new("P", (4, 4), colour).save(body, "PNG")
    return body.getvalue()


def test_images_of_hugging_face_are_decoded(tmp_path: Path) -> None:
    """The features lie in the schema's metadata, as `datasets` writes them."""
    image = {"_type": "Image"}
    features = {
        "image": image,
        "many": {"_type": "List", "feature": image},
        "label": {"names": ["cat", "dog"], "_type": "ClassLabel"},
        "grid": {"shape": [2, 2], "dtype": "int32", "_type": "Array2D"},
    }
    metadata = {b"huggingface": json.dumps({"info": {"features": features}})}
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    one = {"bytes": picture(0), "path": None}
    columns = {
        "image": pa.array([one, None, {"bytes": None, "path": "a.png"}], kind),
        "many": pa.array([[one, one], [], None], pa.list_(kind)),
        "label": [0, 1, 1],
        "grid": pa.array([[[1, 2], [3, 4]]] * 3, pa.list_(pa.list_(pa.int32()))),
    }
    pq.write_table(pa.table(columns).replace_schema_metadata(metadata), tmp_path / "0.parquet")
    dataset = open_dataset(tmp_path)
    assert dataset.classes == ("cat", "dog")
    assert (dataset[0]["image"].mode, dataset[0]["image"].size, len(dataset[0]["many"])) == ("RGB", (4, 4), 2)
    assert dataset[0]["many"][1].mode == "RGB"
    assert (dataset[1]["image"], dataset[1]["many"], dataset[1]["label"]) == (None, [], 1)
    assert (dataset[0]["grid"].dtype, dataset[0]["grid"].tolist()) == (np.int32, [[1, 2], [3, 4]])
    with pytest.raises(CorruptData, match=r"0\.parquet:2 in .* not stored with it, but at 'a\.png'"):
        dataset[2]
    assert open_dataset(tmp_path, decode=None)[0]["image"] == one
    assert open_dataset(tmp_path, image_mode="L")[0]["image"].mode == "L"
    assert open_dataset(tmp_path, fields=("image.bytes",), decode=None)[0] == (picture(0),)


@pytest.mark.parametrize("folder", ["save_to_disk", "to_parquet"])
def test_files_that_hugging_face_wrote(folder: str) -> None:
    """`tests/compat/test_datasets.py` wrote them, and compares more rows with its own reader."""
    dataset = open_dataset(Path(__file__).parent / "hugging_face" / folder)
    assert (len(dataset), dataset.classes) == (6, ("cat", "dog"))
    last = dataset[5]
    assert (last["image"].mode, last["image"].getpixel((0, 0)), len(last["many"])) == ("RGB", (5, 5, 5), 1)
    assert (last["label"], last["text"], dataset[4]["text"], last["score"]) == (1, None, "é4", 0.625)
    assert last["messages"] == [{"role": "user", "content": "c5"}] * 2
    assert last["pairs"] == {"a": [0, 1], "b": ["0", "1"]}
    assert (last["grid"].shape, last["ids"].tolist()) == ((2, 3), [0])
    assert last["when"] == datetime(1970, 1, 1, 0, 0, 5, 5, timezone.utc)
