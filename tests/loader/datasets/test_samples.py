"""Samples of each format, and the conversions and errors of their values."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from cachesvc.core.errors import (
    InvalidInput,
)
from loader import DataLoader, open_dataset, pack
from tests.support import datasets


def test_a_folder_of_classes_gives_values_and_class_indices(home: Path) -> None:
    datasets.write_files(
        home / "d", {f"{c}/{n}.dat": f"{c}{n}".encode() for c in ("cat", "dog") for n in range(3)}
    )
    dataset = open_dataset(home / "d", decode=None)
    assert dataset.classes == ("cat", "dog")
    assert sorted(dataset) == [
        (f"{c}{n}".encode(), i) for i, c in enumerate(("cat", "dog")) for n in range(3)
    ]
    cats = dataset.where("label == 'cat'")
    assert {label for _, label in cats} == {0}
    texts, labels = next(iter(DataLoader(dataset, batch_size=6)))
    assert len(texts) == 6
    assert labels.sum() == 3


def test_tokens_convert_to_the_type_asked_for(home: Path) -> None:
    stream = datasets.tokens(home / "t.bin", 1000)
    dataset = open_dataset(
        home / "t.bin", format="tokens", dtype="uint16", seq_len=99, overlap=1, out="int64"
    )
    [batch] = DataLoader(dataset, batch_size=3).__iter__().__next__().split(3)
    assert batch.dtype == torch.int64
    assert batch[1].tolist() == stream[99:199].tolist()


@pytest.mark.parametrize(("dtype", "out"), [("uint16", "int8"), ("int32", "uint8"), ("float32", "int64")])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_number_that_the_type_asked_for_does_not_hold_is_refused(
    home: Path, dtype: str, out: str, workers: int
) -> None:
    stream = np.arange(400).astype(dtype)
    stream[350] = np.nan if dtype == "float32" else 300
    if dtype == "int32":
        stream[350] = -1
    datasets.array_file(home / "t.bin", stream)
    dataset = open_dataset(home / "t.bin", format="tokens", dtype=dtype, seq_len=50, out=out)
    batches = iter(DataLoader(dataset, batch_size=2, num_workers=workers))
    assert next(batches).flatten().tolist() == list(range(100))
    with pytest.raises(InvalidInput, match="give a wider out"):
        list(batches)
    with pytest.raises(InvalidInput, match="give a wider out"):
        dataset[7]
    if dtype != "float32":
        with pytest.raises(InvalidInput, match="give a wider out"):
            pack(dataset, 400)[0]


@pytest.mark.parametrize("suffix", [".npy", ".bin"])
def test_numbers_of_the_other_byte_order_are_read_as_numpy_reads_them(home: Path, suffix: str) -> None:
    rows = datasets.array_file(home / f"d/a{suffix}", np.arange(60, dtype=">u4").reshape(20, 3))
    opened = open_dataset(home / "d", format="records", dtype="(3,)>u4")
    assert torch.equal(opened[7], torch.tensor(rows[7].tolist(), dtype=torch.uint32))
    assert np.array_equal(next(iter(DataLoader(opened, batch_size=20))).numpy(), rows)
    tokens = open_dataset(home / "d", format="tokens", dtype=">u4", seq_len=6)
    assert pack(tokens, 12)[1]["tokens"].tolist() == rows.ravel()[12:24].tolist()


@pytest.mark.parametrize("dtype", ["S5", "<U3", "<M8[s]", "V7"])
def test_records_that_no_tensor_holds_are_refused_in_words(home: Path, dtype: str) -> None:
    datasets.array_file(home / "d/a.npy", np.zeros(9, dtype))
    opened = open_dataset(home / "d")
    with pytest.raises(InvalidInput, match="tensors do not have"):
        opened[0]


@pytest.mark.parametrize("out", ["S3", "O", "nope", "(2,)i4", "i4,i4"])
def test_an_out_that_no_tensor_has_is_refused_at_opening(home: Path, out: str) -> None:
    datasets.tokens(home / "d/0.bin", 2000)
    with pytest.raises(InvalidInput, match="out="):
        open_dataset(home / "d", format="tokens", dtype="uint16", seq_len=64, out=out)
