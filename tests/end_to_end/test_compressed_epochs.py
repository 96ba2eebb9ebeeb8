"""Compressed objects in a cache of half of their decoded size: a shuffled epoch fetches each at most once."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import pytest

from cachesvc.client.control import Control
from cachesvc.core.errors import OutOfSpace
from loader import DataLoader, open_dataset
from testbed.node import Daemon
from tests.support.datasets import write_files

OBJECTS, ROWS = 16, 250
MIB = 1 << 20


@pytest.mark.slow
def test_a_shuffled_epoch_fetches_no_object_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(0)
    files = {}
    for at in range(OBJECTS):
        rows = [{"n": at * ROWS + n, "text": draw.randbytes(2000).hex()} for n in range(ROWS)]
        files[f"{at:02}.jsonl.gz"] = gzip.compress("\n".join(map(json.dumps, rows)).encode(), 1)
    write_files(tmp_path / "d", files)
    stored = sum(map(len, files.values()))
    half = ["--ram", f"{OBJECTS // 2}MiB", "--extent-bytes", "1MiB", "--allow", str(tmp_path)]
    with Daemon(tmp_path / "node", half) as daemon, Control(daemon.socket_dir) as control:
        monkeypatch.setenv("CACHESVC_SOCKET", daemon.socket_dir)
        monkeypatch.setenv("CACHESVC", "require")
        rows_of = open_dataset(tmp_path / "d")
        assert len(rows_of.catalog.extent_sizes) == OBJECTS
        loader = DataLoader(rows_of, 20, shuffle=True, window=2 * MIB, collate_fn=list)
        before = 0
        for _ in range(3):
            assert sorted(row["n"] for batch in loader for row in batch) == list(range(OBJECTS * ROWS))
            (listed,) = control.list()
            assert listed.source_bytes - before <= 1.2 * stored
            before = listed.source_bytes
            assert before >= stored


def test_an_object_that_no_tier_can_hold_is_an_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = b"".join(b'{"n": %d, "text": "%s"}\n' % (n, b"x" * 1000) for n in range(9 * 1024))
    write_files(tmp_path / "d", {"large.jsonl.gz": gzip.compress(body, 1), "small.jsonl": body[: 1 << 20]})
    small = ["--ram", "8MiB", "--extent-bytes", "1MiB", "--allow", str(tmp_path)]
    with Daemon(tmp_path / "node", small) as daemon:
        monkeypatch.setenv("CACHESVC_SOCKET", daemon.socket_dir)
        monkeypatch.setenv("CACHESVC", "require")
        with pytest.raises(
            OutOfSpace, match=r"large\.jsonl\.gz is cached as one extent of 9,.* KiB, .*holds 8,192 KiB|8 MiB"
        ):
            next(iter(DataLoader(open_dataset(tmp_path / "d"), 20, shuffle=True, collate_fn=list)))
        monkeypatch.setenv("CACHESVC", "auto")
        rows = DataLoader(open_dataset(tmp_path / "d"), 20, shuffle=True, collate_fn=list)
        assert len(next(iter(rows))) == 20
