"""litData's chunks are compiled from their index alone, in each of its compressions, and tokens are one stream."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cachesvc.catalog.options import Options
from cachesvc.core.errors import CacheError, CorruptData, InvalidInput
from loader import DataLoader, open_dataset
from testbed.node import Daemon
from tests.support.catalog_reader import Folder, compiled
from tests.support.datasets import write_files
from tests.support.formats.litdata_chunks import FORMS, LEAF, litdata, litdata_rows, plain

TYPES = {
    "i": "int",
    "f": "float",
    "b": "bool",
    "s": "str",
    "raw": "bytes",
    "flat": "no_header_tensor:17",
    "tensor": "tensor",
    "array": "no_header_numpy:9",
    "matrix": "numpy",
    "list": "json",
    "part": "file:dat",
}


def item(n: int) -> list[bytes]:
    return [
        struct.pack("<q", n - 5),
        struct.pack("<d", n / 2),
        bytes([n % 2]),
        f"ü{n}".encode(),
        bytes([n]) * n,
        np.arange(n).tobytes(),
        struct.pack(">4I", 0, 2, 2, n) + np.full((2, n), n, "<f4").tobytes(),
        np.arange(n, dtype="<f4").tobytes(),
        struct.pack("<4I", 1, 2, n, 2) + np.full((n, 2), -n, "<i2").tobytes(),
        json.dumps([n, "x"]).encode(),
        b"file",
    ]


ITEMS = [item(n) for n in range(40)]


@pytest.mark.parametrize("form", FORMS)
def test_items_come_back_in_every_compression(tmp_path: Path, form: str) -> None:
    rows = open_dataset(litdata(tmp_path / "d", TYPES, ITEMS, 11, form))
    assert len(rows) == 40
    for n, row in enumerate(rows):
        assert list(row) == list(TYPES)
        assert (row["i"], row["f"], row["b"]) == (n - 5, n / 2, n % 2 == 1)
        assert (row["s"], row["raw"], row["list"], row["part"]) == (
            f"ü{n}",
            bytes([n]) * n,
            [n, "x"],
            b"file",
        )
        assert row["flat"].equal(torch.arange(n))
        assert row["tensor"].equal(torch.full((2, n), float(n)))
        assert np.array_equal(row["array"], np.arange(n, dtype=np.float32))
        assert np.array_equal(row["matrix"], np.full((n, 2), -n, np.int16))


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_a_daemon_fills_and_grants_chunks(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    root = litdata(tmp_path / "d", {"i": "int"}, [[struct.pack("<q", n)] for n in range(40)], 11, form)
    with Daemon(tmp_path / "node", ["--ram", "64MiB", "--allow", str(tmp_path)]) as daemon:
        monkeypatch.setenv("CACHESVC_SOCKET", daemon.socket_dir)
        batches = DataLoader(open_dataset(root), 8, shuffle=True)
        assert sorted(n for batch in batches for n in batch.tolist()) == list(range(40))


@pytest.mark.parametrize("form", FORMS)
def test_opening_reads_no_items(tmp_path: Path, form: str) -> None:
    folder = Folder()
    catalog = compiled(litdata(tmp_path / "d", TYPES, ITEMS, 11, form), folder=folder)
    assert (catalog.samples, len(catalog.extent_sizes)) == (40, 4)
    assert len(folder.reads) <= 1 + 2 * 4


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        (LEAF, ["value"]),
        ({"type": "builtins.tuple", "context": "null", "children_spec": [LEAF, LEAF]}, ["0", "1"]),
        (
            {
                "type": "builtins.dict",
                "context": '["a", "n"]',
                "children_spec": [
                    LEAF,
                    {"type": "builtins.list", "context": "null", "children_spec": [LEAF]},
                ],
            },
            ["a", "n.0"],
        ),
    ],
)
def test_values_are_named_by_their_path(tmp_path: Path, spec: dict[str, Any], names: list[str]) -> None:
    types = {name: "int" for name in names}
    items = [[struct.pack("<q", n)] * len(names) for n in range(3)]
    root = litdata(tmp_path / "d", types, items, 2, data_spec=json.dumps([1, spec]))
    rows = open_dataset(root)
    assert [field.name for field in rows.catalog.fields] == names
    assert rows[2] == (2 if len(names) == 1 else dict.fromkeys(names, 2))


def tokens(root: Path, **config: Any) -> Path:
    """Write two chunks of documents: 0 to 99, and 100 to 149."""
    bodies = [
        [np.arange(a, b, dtype="<u2").tobytes() for a, b in pairs]
        for pairs in ([(0, 60), (60, 100)], [(100, 150)])
    ]
    chunks = [
        {"chunk_bytes": 1, "chunk_size": len(part), "dim": dim, "filename": f"chunk-0-{n}.bin"}
        for n, (part, dim) in enumerate(zip(bodies, (100, 50), strict=True))
    ]
    told = {"compression": None, "data_format": ["no_header_tensor:20"], "data_spec": json.dumps([1, LEAF])}
    index = {"chunks": chunks, "config": told | {"item_loader": "TokensLoader"} | config}
    write_files(root, {f"chunk-0-{n}.bin": plain(part) for n, part in enumerate(bodies)})
    write_files(root, {"index.json": json.dumps(index).encode()})
    return root  # fmt: skip


def test_tokens_are_blocks_of_each_chunk(tmp_path: Path) -> None:
    rows = open_dataset(tokens(tmp_path / "d"), seq_len=40)
    assert [row.tolist() for row in rows] == [list(range(a, a + 40)) for a in (0, 40, 100)]
    assert rows[0].dtype == torch.uint16
    assert any("the last 40 bytes are no whole sample" in note for note in rows.catalog.notes)
    shifted = open_dataset(tokens(tmp_path / "d"), seq_len=20, overlap=1, targets="shifted")
    assert [value.tolist()[:2] for value in shifted[1]] == [[20, 21], [21, 22]]


def test_tokens_need_a_length_and_other_items_take_none(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"need seq_len= .*block_size"):
        compiled(tokens(tmp_path / "d"))
    root = litdata(tmp_path / "e", {"i": "int"}, [[bytes(8)]] * 4, 2)
    with pytest.raises(InvalidInput, match="not written for TokensLoader"):
        compiled(root, Options(seq_len=4))


@pytest.mark.parametrize(
    ("config", "error", "said"),
    [
        ({"encryption": {"algorithm": "fernet"}}, InvalidInput, "is encrypted"),
        ({"compression": "lz4"}, InvalidInput, "compressed with 'lz4'; none and zstd are read"),
        ({"compression": "zstd", "compression_level": "row"}, InvalidInput, "compression_level 'row'"),
        ({"item_loader": "ParquetLoader"}, InvalidInput, "open them with format='parquet'"),
        (
            {"item_loader": "TemporalArrayLoader"},
            InvalidInput,
            "is for TemporalArrayLoader, which is not read",
        ),
        ({"data_format": []}, CorruptData, "'data_format' is no list of 1 to"),
        ({"data_format": ["int", "int"]}, CorruptData, "data_spec names 1 values, data_format 2"),
        ({"data_spec": "[1, 2]"}, CorruptData, "'data_spec' is no tree of values"),
        ({"data_spec": "[" * 100_000}, CorruptData, "'data_spec' is no tree of values"),
        ({"data_spec": None}, CorruptData, "'data_spec' is missing"),
    ],
)
def test_a_config_that_is_damaged_or_of_features_that_are_not_read_is_named(
    tmp_path: Path, config: dict[str, Any], error: type[CacheError], said: str
) -> None:
    root = litdata(tmp_path / "d", {"i": "int"}, [[bytes(8)]] * 4, 2, **config)
    with pytest.raises(error, match=said):
        compiled(root)


@pytest.mark.parametrize("form", ["plain", "batch"])
@pytest.mark.parametrize("told", [1, 3])
def test_a_count_that_differs_from_the_chunk_is_named(tmp_path: Path, form: str, told: int) -> None:
    path = litdata(tmp_path / "d", {"i": "int"}, [[bytes(8)]] * 4, 2, form) / "index.json"
    index = json.loads(path.read_text())
    index["chunks"][1]["chunk_size"] = told
    path.write_text(json.dumps(index))
    with pytest.raises(CorruptData, match=rf"chunk-0-1\.bin says that it holds 2 items, .*says {told}"):
        compiled(path.parent)


@pytest.mark.parametrize("form", ["chunk", "batch", "sample"])
@pytest.mark.parametrize("cut", [4, 30])
def test_a_truncated_or_damaged_chunk_is_corrupt(tmp_path: Path, form: str, cut: int) -> None:
    root = litdata(tmp_path / "d", TYPES, ITEMS[20:], 20, form)
    (path,) = root.glob("chunk-*")
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(CorruptData):
        open_dataset(root)[19]
    path.write_bytes(b"\xff" * 900)
    with pytest.raises(CorruptData):
        open_dataset(root)[19]


def test_an_absent_chunk_and_one_named_twice_are_refused(tmp_path: Path) -> None:
    path = litdata(tmp_path / "d", {"i": "int"}, [[bytes(8)]] * 4, 2) / "index.json"
    index = json.loads(path.read_text())
    path.write_text(json.dumps(index | {"chunks": index["chunks"] * 2}))
    with pytest.raises(CorruptData, match=r"chunks\[2\] names 'chunk-0-0\.bin' again"):
        compiled(path.parent)
    path.write_text(json.dumps(index))
    (path.parent / "chunk-0-1.bin").unlink()
    with pytest.raises(CorruptData, match=r"chunks\[1\] names 'chunk-0-1\.bin', which does not exist"):
        compiled(path.parent)


ROWS: list[dict[str, Any]] = [
    {"text": f"ü{n}" * n, "n": n, "turns": [{"who": "x" * n, "ids": list(range(n))}] * (n % 3)}
    for n in range(25)
]


@pytest.mark.parametrize("compression", [None, pytest.param("zstd", marks=pytest.mark.slow)])
def test_chunks_of_arrow_are_rows(
    tmp_path: Path, compression: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = litdata_rows(tmp_path / "d", ROWS, 10, compression)
    assert json.loads(json.dumps(list(open_dataset(root)), default=list)) == ROWS
    with Daemon(tmp_path / "node", ["--ram", "64MiB", "--allow", str(tmp_path)]) as daemon:
        monkeypatch.setenv("CACHESVC_SOCKET", daemon.socket_dir)
        batches = DataLoader(open_dataset(root), 8, shuffle=True, collate_fn=list)
        assert sorted(row["text"] for batch in batches for row in batch) == sorted(
            row["text"] for row in ROWS
        )


def test_damaged_chunks_of_arrow_are_refused_by_name(tmp_path: Path) -> None:
    root = litdata_rows(tmp_path / "d", ROWS, 10)
    path = root / "chunk-0-1.bin"
    body = path.read_bytes()
    for damaged, wrong in (
        (
            body[:-12] + struct.pack("<I8s", len(body), b"LDARW01\0"),
            "chunk-0-1.bin is truncated before its Arrow",
        ),
        (body[-500:], "chunk-0-1.bin is truncated before its Arrow|chunk-0-1.bin is no Arrow"),
        ((root / "chunk-0-2.bin").read_bytes(), "says that it holds 25 items, and its chunks hold 20"),
        (plain([b""] * 10), "chunk-0-1.bin holds no Arrow, and chunks before it do"),
    ):
        path.write_bytes(damaged)
        with pytest.raises((CorruptData, InvalidInput), match=wrong):
            compiled(root)


def test_pickles_are_refused_and_other_fields_are_read(tmp_path: Path) -> None:
    root = litdata(tmp_path / "d", {"i": "int", "p": "pickle"}, [[bytes(8), b"cos\nsystem\n"]] * 4, 2)
    with pytest.raises(InvalidInput, match="field 'p' is a pickle"):
        open_dataset(root)
    assert open_dataset(root, fields="i")[0] == 0
    assert open_dataset(root, decode=None)[0]["p"] == b"cos\nsystem\n"
