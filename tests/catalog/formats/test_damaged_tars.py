"""Damaged tars are named all at once, or left out with a note that names them."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from cachesvc.core.errors import CorruptData, InvalidInput
from loader import DataLoader, open_dataset
from testbed.node import Daemon
from tests.support.datasets import mds_shards, tar_bytes, write_files

pytestmark = pytest.mark.usefixtures("direct")
WHOLE = {
    f"{shard}.tar": tar_bytes(
        {f"{shard}{n}": {"jpg": b"%d%d" % (shard, n) * 700, "cls": b"%d" % n} for n in range(4)}
    )
    for shard in range(8)
}
NO_END = WHOLE["1.tar"].rstrip(b"\0").ljust(-(-len(WHOLE["1.tar"].rstrip(b"\0")) // 512) * 512, b"\0")
FLIPPED = WHOLE["5.tar"][:2048] + b"garbage" + WHOLE["5.tar"][2055:]
DAMAGED = {
    "1.tar": NO_END,
    "3.tar": WHOLE["3.tar"][:3000],
    "5.tar": FLIPPED,
    "6.tar": b"",
    "7.tar.gz": gzip.compress(WHOLE["7.tar"])[:-40],
}
KEPT = (0, 2, 4)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    files = {name: body for name, body in WHOLE.items() if name not in (*DAMAGED, "7.tar")} | DAMAGED
    write_files(tmp_path / "d", files)
    return tmp_path / "d"


def check_kept(root: Path) -> None:
    data = open_dataset(root, fields=("key", "jpg", "cls"), decode=None, on_error="skip", extent_bytes=4096)
    expected = {f"{s}{n}": (b"%d%d" % (s, n) * 700, b"%d" % n) for s in KEPT for n in range(4)}
    assert {key: rest for key, *rest in data} == {key: list(value) for key, value in expected.items()}
    assert len(data.where("label == 3")) == len(KEPT)
    keys = [key for batch in DataLoader(data, 5, shuffle=True, collate_fn=list) for key, _, _ in batch]
    assert sorted(keys) == sorted(expected)
    (note,) = [note for note in data.catalog.notes if "on_error" in note]
    assert all(name in note for name in DAMAGED)
    data.close()


def test_all_damaged_tars_are_named_at_once(root: Path) -> None:
    with pytest.raises(CorruptData) as caught:
        open_dataset(root)
    said = str(caught.value)
    assert said.startswith(
        "5 of 8 archives are damaged: 1.tar, 3.tar, 5.tar, 6.tar, 7.tar.gz; write them anew"
    )
    assert "1.tar: truncated at offset" in said
    assert "\n" not in said


def test_damaged_tars_are_left_out_with_a_note(root: Path) -> None:
    check_kept(root)


@pytest.mark.slow
def test_a_daemon_leaves_them_out_too(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Daemon(tmp_path / "node", ["--ram", "64MiB", "--allow", str(root)]) as daemon:
        monkeypatch.setenv("CACHESVC_SOCKET", daemon.socket_dir)
        monkeypatch.setenv("CACHESVC", "require")
        check_kept(root)


def test_where_nothing_is_whole_skip_is_an_error(tmp_path: Path) -> None:
    write_files(tmp_path, {"3.tar": DAMAGED["3.tar"]})
    with pytest.raises(CorruptData, match=r"3\.tar: truncated"):
        open_dataset(tmp_path, on_error="skip")


def test_other_formats_and_values_are_refused(tmp_path: Path) -> None:
    mds_shards(tmp_path / "d", {"x": "bytes"}, [{"x": b"1"}], 1)
    with pytest.raises(InvalidInput, match="on_error='skip' is for webdataset"):
        open_dataset(tmp_path / "d", on_error="skip")
    with pytest.raises(InvalidInput, match="give 'raise' or 'skip'"):
        open_dataset(tmp_path / "d", on_error="substitute")  # type: ignore[arg-type]
    assert len(open_dataset(tmp_path / "d", on_error="raise")) == 1


@pytest.mark.parametrize("seed", range(40))
def test_a_tar_that_is_cut_anywhere_leaves_no_trace(tmp_path: Path, seed: int) -> None:
    cut = int(np.random.default_rng(seed).integers(1, len(NO_END)))
    write_files(
        tmp_path / "d", {"0.tar": WHOLE["0.tar"], "1.tar": WHOLE["1.tar"][:cut], "2.tar": WHOLE["2.tar"]}
    )
    data = open_dataset(
        tmp_path / "d", fields=("key", "jpg"), decode=None, on_error="skip", extent_bytes=4096
    )
    assert [key for key, _ in data] == [f"{s}{n}" for s in (0, 2) for n in range(4)]
    assert all(body == key.encode() * 700 for key, body in data)
