"""Containers that are not read are refused by name, with advice, and never open as one opaque sample a shard."""

from __future__ import annotations

import gzip
import json
import pickle
import random
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import lmdb
import numpy as np
import pyarrow as pa
import pyarrow.orc as orc
import pytest

from cachesvc.catalog.options import Options
from tests.support.catalog_reader import Folder, compiled
from tests.support.datasets import write_files
from tests.support.folders import BIG, HDF5, IMAGES, TAR, left_out, opened, parquet, refusal


def npz(path: Path) -> None:
    np.savez(path, x=np.arange(3))


def _lmdb(folder: Path) -> None:
    with lmdb.open(str(folder)) as made, made.begin(write=True) as transaction:
        transaction.put(b"key", b"value")


def _arrow(folder: Path, name: str) -> None:
    table = pa.table({"a": [1]})
    with (
        pa.OSFile(str(folder / name), "wb") as file,
        pa.ipc.new_stream(file, table.schema) as out,
    ):
        out.write_table(table)
    write_files(folder, {"state.json": b"{}", "dataset_info.json": b"{}"})


def _zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.jpg", b"x")


def _litdata_chunk(*items: bytes) -> bytes:
    offsets = np.cumsum([4 * (len(items) + 2), *map(len, items)], dtype="<u4")
    return struct.pack("<I", len(items)) + offsets.tobytes() + b"".join(items)


def _safetensors() -> bytes:
    head = json.dumps({"x": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}).encode()
    return struct.pack("<Q", len(head)) + head + b"ab"


def _tfrecord() -> bytes:
    """Return a TFRecord as TensorFlow writes it: a length and its masked CRC-32C before the record."""
    return struct.pack("<QI", 5, 0x3E04B2EA) + b"hello" + bytes(4)


IDX = struct.pack(">iiii", 2051, 1, 28, 28) + bytes(784)
LLM_C = struct.pack("<3i", 20240520, 1, 4) + bytes(1020)
CONTAINERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "orc": ("ORC", lambda d: orc.write_table(pa.table({"a": [1]}), d / "a.orc")),
    "npz": ("npz", lambda d: npz(d / "a.npz")),
    "npz beside json": ("npz", lambda d: (npz(d / "a.npz"), write_files(d, {"a.json": b"{}"}))),
    "lmdb": ("LMDB", _lmdb),
    "zip": ("zip", lambda d: _zip(d / "a.ZIP")),
    "safetensors": ("safetensors", lambda d: write_files(d, {"a.safetensors": _safetensors()})),
    "hdf5": ("HDF5", lambda d: write_files(d, {"a.h5": HDF5, "b.hdf5": HDF5})),
    "zarr 2": ("Zarr", lambda d: write_files(d, {".zgroup": b"{}", "x/.zarray": b"{}", "x/0.0": b"1", "x/0.1": b"1"})),
    "zarr 3": ("Zarr", lambda d: write_files(d, {"zarr.json": b"{}", "x/zarr.json": b"{}", "x/c/0/0": b"1"})),
    "zarr below": ("Zarr", lambda d: write_files(d, {"x.zarr/.zgroup": b"{}", "x.zarr/a/0.0": b"1"})),
    "array records": ("ArrayRecord", lambda d: write_files(d, {"t.array_record-00000-of-00002": b"x"})),
    "idx of mnist": ("idx", lambda d: write_files(d, {"train-images-idx3-ubyte": IDX, "train-labels.idx1-ubyte": IDX})),
    "idx, compressed": ("idx", lambda d: write_files(d, {"t10k-images-idx3-ubyte.gz": gzip.compress(IDX)})),
    # found by content
    "pickles of cifar": ("a pickle", lambda d: write_files(d, {"data_batch_1": pickle.dumps({b"data": b"x"}, 2)})),
    "pickles": ("a pickle", lambda d: write_files(d, {n: pickle.dumps(["a", "b", 3]) for n in ("train", "test", "meta")})),
    "hdf5 of another name": ("HDF5", lambda d: write_files(d, {"a.dat": HDF5})),
    "tfrecord without extension": ("TFRecord, which needs", lambda d: write_files(d, {"t-00000-of-00001": _tfrecord()})),
    "litdata of other names": ("litData", lambda d: write_files(d, {"a.bin": _litdata_chunk(b"ab", b"c"), "b.bin": b"x"})),
    "zip of another name": ("zip", lambda d: _zip(d / "a.dat")),
    "lmdb of another name": ("LMDB", lambda d: (_lmdb(d), (d / "data.mdb").rename(d / "all"))),
    "arrow of another name": ("Arrow, which needs a name that ends with .arrow", lambda d: _arrow(d, "part-0")),
    "safetensors of another name": ("safetensors", lambda d: write_files(d, {"a.model": _safetensors()})),
    "parquet of another name": ("Parquet, which needs a name that ends with .parquet", lambda d: parquet(d / "part-0")),
    "tar of another name": ("tar, which needs", lambda d: write_files(d, {"a.shard": TAR})),
    "numbered parts": ("HDF5", lambda d: write_files(d, {f"x.{n:03}": HDF5 for n in range(40)})),
    "a long list called json": ("a JSON list", lambda d: write_files(d, {"a.json": b'[{"a": 1}' + b" " * len(BIG) + b"]"})),
    "tokens of llm.c": ("tokens of llm.c, which needs format='tokens'", lambda d: write_files(d, {"t.bin": LLM_C})),
}  # fmt: skip


@pytest.mark.parametrize("case", CONTAINERS)
def test_an_unread_container_is_refused_by_name_with_advice(tmp_path: Path, case: str) -> None:
    name, write = CONTAINERS[case]
    (tmp_path / "d").mkdir()
    write(tmp_path / "d")
    error = refusal(tmp_path / "d")
    assert f"{name}" in error
    assert "which" in error.partition(name.partition(",")[0])[2]
    assert "format='files' reads each file as one sample of bytes" in error
    as_it_is = compiled(tmp_path / "d", Options(format="files"))
    assert as_it_is.samples > 0
    assert as_it_is.notes == ()


def test_a_compressed_tar_is_recognised_by_content_too(tmp_path: Path) -> None:
    assert "b.tar is compressed by gzip: give it a name that says so" in refusal(
        tmp_path / "d", {"a.tar": TAR, "b.tar": gzip.compress(TAR)}
    )


def test_an_unrelated_container_is_recognised_by_content_and_left_out(tmp_path: Path) -> None:
    catalog = opened(tmp_path / "d", {f"{n}.flac": b"fLaC" for n in range(3)} | {"features": HDF5})
    assert (catalog.samples, left_out(catalog)) == (3, (1, 4, "features"))


def test_tables_that_label_nothing_are_not_samples(tmp_path: Path) -> None:
    catalog = opened(
        tmp_path / "d",
        IMAGES | {"rows.csv": b"a,b\n1,2\n", "cat/metadata.jsonl": b'{"file_name": "0.jpg"}\n'},
    )
    assert (catalog.samples, left_out(catalog)[:2]) == (10, (2, 12))
    error = refusal(tmp_path / "e", {"rows.csv": b"a,b\n1,2\n", "x.png": b"1"})
    assert "rows.csv holds rows, and no labels of the other files: format='csv' reads its rows" in error


@pytest.mark.parametrize("format", ["", "files"])
def test_large_objects_of_unknown_kind_are_noted_unless_the_format_is_given(
    tmp_path: Path, format: str
) -> None:
    noise = random.Random(0).randbytes(len(BIG))
    catalog = opened(tmp_path / "d", {"a.weird": noise, "b.weird": noise, "c.weird": b"small"}, format=format)
    assert catalog.samples == 3
    warned = [
        note
        for note in catalog.notes
        if note.startswith("2 objects of unknown kind are read as opaque bytes")
    ]
    assert len(warned) == len(catalog.notes) == (not format)
    (only,) = opened(tmp_path / "e", IMAGES | {"a.weird": noise}).notes
    assert only.startswith("1 of 11 objects are no files and were left out")


@pytest.mark.parametrize(
    "body",
    [
        b"ORCA wrote this",
        b"\xff" * 600,
        bytes(600),
        b"",
        b'[{"a": 1}]',
        np.arange(200, dtype="<f4").tobytes(),
    ],
)
@pytest.mark.parametrize("name", ["a.dat", "a.bin", "a", "a.json"])
def test_small_files_of_any_content_are_samples(tmp_path: Path, name: str, body: bytes) -> None:
    assert opened(tmp_path / "d", {name: body, f"x/{name}": b"x"}).samples == 2


def test_litdata_chunks_are_not_taken_for_tokens(tmp_path: Path) -> None:
    assert "is read as litdata" in refusal(
        tmp_path / "d", {"chunk-0-0.bin": _litdata_chunk(b"ab")}, dtype="u2", seq_len=1
    )


@pytest.mark.parametrize("name", ["a.mp4", "a.wav", "a.nii.gz", "a.txt", "a.jpg"])
def test_large_files_of_a_known_kind_are_not_noted(tmp_path: Path, name: str) -> None:
    assert opened(tmp_path / "d", {name: BIG}).notes == ()


def test_only_the_beginning_of_few_objects_is_read(tmp_path: Path) -> None:
    folder = Folder()
    write_files(tmp_path / "d", {f"{n}.{kind}": b"\0" * 9 for n in range(9) for kind in ("kind_a", "kind_b")})
    compiled(tmp_path / "d", folder=folder)
    assert len(folder.reads) == 2
