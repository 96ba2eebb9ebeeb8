"""An MDS index that tells another number of samples than a shard does is found before the first epoch, by name."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.node import Daemon
from cachesvc.__main__ import run
from cachesvc.core.errors import CorruptData
from tests.catalog_reader import Folder, compiled
from tests.datasets import mds_shards


def shards(root: Path, compression: str = "", told: int = 41) -> Path:
    """Three shards of 40 samples, of the second of which the index tells another number."""
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


def test_offsets_outside_a_shard_name_it(tmp_path: Path) -> None:
    catalog = compiled(shards(tmp_path / "d", "zstd"))
    pairs = np.array([[168, 272], [168, 1 << 30]], np.uint32)
    with pytest.raises(CorruptData, match=r"/d/shard\.00001\.mds\.zstd has an offset table .* sample 80 "):
        catalog.settle(np.array([0, 80]), pairs)
