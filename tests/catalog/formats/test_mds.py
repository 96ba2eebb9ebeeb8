"""An MDS index is parsed a shard at a time, and a wrong sample count of a shard is found before the first epoch."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cachesvc.__main__ import run
from cachesvc.catalog.compiler import Inputs, ListedObject
from cachesvc.catalog.formats.mds import compile_mds
from cachesvc.catalog.options import Options
from cachesvc.core.errors import CorruptData, InvalidInput
from cachesvc.core.model import ObjectVersion
from loader import open_dataset
from testbed.node import Daemon
from tests.support.catalog_reader import Folder, compiled
from tests.support.datasets import MDS_PACKERS, mds_shards


def shards(root: Path, compression: str = "", told: int = 41) -> Path:
    """Write three shards of 40 samples, with another count for the second one in the index."""
    mds_shards(root, {"x": "bytes"}, [{"x": os.urandom(100)}] * 120, 40, compression)
    path = root / "index.json"
    index = json.loads(path.read_text())
    index["shards"][1]["samples"] = told
    path.write_text(json.dumps(index))
    return root


@pytest.mark.parametrize("told", [39, 41])
def test_opening_names_the_shard_and_both_numbers(tmp_path: Path, told: int) -> None:
    with pytest.raises(
        CorruptData, match=r"shard\.00001\.mds says .* 40 samples, .*index\.json: shards\[1\]"
    ) as caught:
        compiled(shards(tmp_path / "d", told=told))
    assert f"says {told}" in str(caught.value)


def test_opening_reads_each_plain_shard_once_and_no_compressed_one(tmp_path: Path) -> None:
    for compression, reads in (("", 4), ("zstd", 1)):
        folder = Folder()
        root = shards(tmp_path / f"d{compression}", compression, told=40)
        assert compiled(root, folder=folder).samples == 120
        assert len(folder.reads) == reads


@pytest.mark.parametrize("compression", ["", "zstd"])
def test_a_shard_that_an_index_names_twice_is_refused(tmp_path: Path, compression: str) -> None:
    path = shards(tmp_path / "d", compression, told=40) / "index.json"
    index = json.loads(path.read_text())
    index["shards"].append(index["shards"][1])
    path.write_text(json.dumps(index))
    with pytest.raises(CorruptData, match=r"index\.json: shards\[3\] names 'shard\.00001\.mds.* again"):
        compiled(path.parent)


@pytest.mark.slow
def test_a_compressed_shard_is_named_when_it_is_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    root = shards(tmp_path / "d", "zstd")
    with Daemon(
        tmp_path / "node", ["--ram", "6MiB", "--extent-bytes", "1MiB", "--allow", str(tmp_path)]
    ) as daemon:
        monkeypatch.setenv("CACHESVC_SOCKET", daemon.socket_dir)
        assert run(["prefetch", str(root)]) == CorruptData.code
    assert "shard.00001.mds.zstd says that it holds 40 samples" in capsys.readouterr().err


def test_offsets_outside_a_shard_are_an_error_that_names_it(tmp_path: Path) -> None:
    catalog = compiled(shards(tmp_path / "d", "zstd"))
    pairs = np.array([[168, 272], [168, 1 << 30]], np.uint32)
    with pytest.raises(CorruptData, match=r"/d/shard\.00001\.mds\.zstd has an offset table .* sample 80 "):
        catalog.settle(np.array([0, 80]), pairs)


@pytest.mark.slow
def test_a_long_index_costs_a_window_of_memory() -> None:
    """Parsed as a whole, the index took 53 MB."""
    count = 20_000
    index = {"shards": [listed(number) for number in range(count)], "version": 2}
    whole = json.dumps(index).encode()
    names = {f"s3://b/shard.{number:05}.mds": 12 for number in range(count)} | {
        "s3://b/index.json": len(whole)
    }
    entries = [
        ListedObject(ObjectVersion(uri, size, "e"), uri.rpartition("/")[2]) for uri, size in names.items()
    ]

    def fetch(version: ObjectVersion, offset: int, length: int) -> bytes:
        return whole[offset : offset + length] if version.uri.endswith(".json") else b"\1\0\0\0"

    inputs = Inputs("s3://b/", entries, Options(), fetch, NoData(), lambda done, total: None)
    tracemalloc.start()
    try:
        draft = compile_mds(inputs)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert draft.extent_first[-1] == count
    assert len(whole) > 7 << 20
    assert peak < 30 << 20


def listed(number: int) -> dict[str, Any]:
    raw = {"basename": f"shard.{number:05}.mds", "bytes": 12, "hashes": {"sha1": f"{number:040}"}}
    names = ["caption", "height", "image", "url", "width"]
    types = {
        "column_encodings": ["str", "int", "jpeg", "str", "int"],
        "column_sizes": [None, 8, None, None, 8],
    }
    shard = {"column_names": names, "compression": None, "format": "mds", "hashes": ["sha1"], "samples": 1}
    return {**shard, **types, "raw_data": raw, "size_limit": 1 << 26, "version": 2, "zip_data": None}


class NoData:
    """Refuses reads: an index describes the data completely."""

    def declare(self, extents: object) -> None:
        raise AssertionError

    def read(self, extent: int, offset: int, length: int) -> bytes:
        raise AssertionError


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"version": 3}, InvalidInput, "is MDS version 3"),
        ({"version": None}, CorruptData, "field 'version' is missing"),
        ({"shards": {}}, CorruptData, r"index\.json is broken at character 11: '\[' is missing"),
        ({"shards": [1]}, CorruptData, r"shards\[0\]: field 'format' is missing"),
    ],
)
def test_an_index_of_another_kind_is_named(
    tmp_path: Path, change: dict[str, Any], error: type[Exception], said: str
) -> None:
    path = shards(tmp_path / "d", told=40) / "index.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}, sort_keys=True))
    with pytest.raises(error, match=said):
        compiled(path.parent)


@pytest.mark.parametrize(
    ("index", "said"),
    [
        ('{"version": 2}', "field 'shards' is missing"),
        ('{"version": 2, "shards": [], "shards": []}', "lists its shards twice"),
    ],
)
def test_an_index_lists_its_shards_once(tmp_path: Path, index: str, said: str) -> None:
    path = shards(tmp_path / "d", told=40) / "index.json"
    path.write_text(index)
    with pytest.raises(CorruptData, match=said):
        compiled(path.parent)


ROWS = [{"x": f"row {number}, ".encode() * number} for number in range(60)]


@pytest.mark.parametrize("compression", ["", *MDS_PACKERS])
def test_shards_are_read_in_every_compression_of_the_writer(tmp_path: Path, compression: str) -> None:
    mds_shards(tmp_path / "d", {"x": "bytes"}, ROWS, 25, compression, ["sha1", "xxh64"])
    catalog = compiled(tmp_path / "d")
    assert [catalog.extent(at).pieces[0].hash[:5] for at in range(3)] == ["sha1:"] * 3
    assert list(open_dataset(tmp_path / "d")) == [row["x"] for row in ROWS]


@pytest.mark.parametrize("compression", MDS_PACKERS)
def test_a_shard_that_differs_from_its_hash_is_named(tmp_path: Path, compression: str) -> None:
    mds_shards(tmp_path / "d", {"x": "bytes"}, ROWS, 25, compression, ["xxh3_128", "sha1"])
    path = tmp_path / "d" / f"shard.00001.mds.{compression}"
    stored = bytearray(path.read_bytes())
    stored[len(stored) // 2] ^= 1
    path.write_bytes(stored)
    samples = open_dataset(tmp_path / "d")
    assert samples[0] == b""
    with pytest.raises(
        CorruptData, match=rf"shard\.00001\.mds\.{compression} has the xxh3_128 .*two reads agree"
    ):
        samples[30]


def test_hashes_of_unknown_algorithms_are_noted(tmp_path: Path) -> None:
    mds_shards(tmp_path / "d", {"x": "bytes"}, ROWS, 25, "gz")
    path = tmp_path / "d" / "index.json"
    path.write_text(path.read_text().replace('"hashes": {}', '"hashes": {"blake9": "00"}'))
    catalog = compiled(tmp_path / "d")
    assert catalog.notes[0].startswith("'blake9' is no known hash, so shard.00000.mds.gz and others")
    assert not catalog.extent(0).pieces[0].hash


def test_a_wrong_type_of_hashes_is_named(tmp_path: Path) -> None:
    mds_shards(tmp_path / "d", {"x": "bytes"}, ROWS, 25)
    path = tmp_path / "d" / "index.json"
    path.write_text(path.read_text().replace('"hashes": {}', '"hashes": [1]'))
    with pytest.raises(CorruptData, match=r"shards\[0\]\.raw_data: field 'hashes' is no object of strings"):
        compiled(tmp_path / "d")


def tree(root: Path, *folders: str) -> Path:
    """Write two shards of 10 rows into each folder."""
    for number, folder in enumerate(folders):
        mds_shards(root / folder, {"x": "bytes"}, [{"x": bytes([number, n])} for n in range(20)], 10)
    return root


def test_subfolders_that_have_an_index_are_one_dataset(tmp_path: Path) -> None:
    root = tree(tmp_path / "d", "a", "b/deep", "c")
    wanted = [bytes([number, n]) for number in range(3) for n in range(20)]
    assert list(open_dataset(root)) == wanted
    assert sorted(open_dataset([str(root / "c"), str(root / "a")])) == wanted[:20] + wanted[40:]


def test_an_index_above_others_lists_their_shards(tmp_path: Path) -> None:
    root = tree(tmp_path / "d", "a/x", "a/y", "b")
    shards = []
    for folder in ("x", "y"):
        for shard in json.loads((root / "a" / folder / "index.json").read_text())["shards"]:
            shard["raw_data"]["basename"] = f"{folder}/{shard['raw_data']['basename']}"
            shards.append(shard)
    (root / "a" / "index.json").write_text(json.dumps({"shards": shards, "version": 2}))
    assert compiled(root).samples == 60


def test_splits_are_datasets_of_their_own(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"holds 2 splits, train \(3 files\), validation \(3 files\)"):
        compiled(tree(tmp_path / "d", "train", "val"))
    assert compiled(tree(tmp_path / "e", "train/a", "train/b")).samples == 40
