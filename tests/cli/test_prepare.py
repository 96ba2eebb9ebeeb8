"""`cachesvc prepare` from its arguments to its last line and exit code."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cachesvc.__main__ import run
from loader import DataLoader, open_dataset
from testbed.node import Daemon
from tests.loader.prepare.pictures import COUNT, SPELLED_BYTES, calls, half, write_pictures

WITH = ["--with", "tests.loader.prepare.pictures:half", "--workers", "2", "--json"]


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    write_pictures(tmp_path / "data")
    options = ["--ram", "256KiB", "--extent-bytes", "16384", "--fillers", "1", "--allow", f"{tmp_path}/data"]
    monkeypatch.setenv("CACHESVC", "require")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("LOUD", "1")
    with Daemon(tmp_path / "node", options) as found:
        monkeypatch.setenv("CACHESVC_SOCKET", found.socket_dir)
        yield found


@pytest.mark.slow
def test_a_dry_run_tells_size_fit_and_cost_and_a_run_prepares_each_sample_once(
    daemon: Daemon, tmp_path: Path, capsys: Any
) -> None:
    data = str(tmp_path / "data")
    assert run(["prepare", data, *WITH, "--dry-run"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["event"] for row in rows] == ["estimated", "fit"]
    assert (rows[0]["samples"], rows[1]["resident_extents"]) == (COUNT, 0)
    assert rows[0]["size_bytes"] == rows[1]["size_bytes"] > COUNT * 12 * 12 * 3
    assert rows[0]["sample_s"] > 0
    assert run(["prepare", data, *WITH]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines() if '"prefetched"' in line]
    assert rows[-1]["resident"]
    before = calls(tmp_path / "calls")
    batches = DataLoader(open_dataset(data, prepare=half), 8)
    assert sum(len(labels) for _, labels in batches) == COUNT
    assert calls(tmp_path / "calls") == before


@pytest.mark.slow
def test_shards_prepare_each_sample_once_together(daemon: Daemon, tmp_path: Path, capsys: Any) -> None:
    data, shards = str(tmp_path / "data"), 2
    rows = []
    for shard in range(shards):
        assert run(["prepare", data, *WITH, "--shard", f"{shard}/{shards}"]) == 0
        rows.append([json.loads(line) for line in capsys.readouterr().out.splitlines()])
    estimated, fit, done = zip(*([one for one in found if "event" in one] for found in rows), strict=True)
    assert sum(row["samples"] for row in estimated) == COUNT
    assert min(row["samples"] for row in estimated) > 0
    assert [row["size_bytes"] for row in fit] == [row["resident_bytes"] for row in done]
    assert sum(row["extents"] for row in done) == done[0]["of_extents"] >= shards
    called = calls(tmp_path / "calls")
    batches = DataLoader(open_dataset(data, prepare=half), 8)
    assert sum(len(labels) for _, labels in batches) == COUNT
    assert calls(tmp_path / "calls") == called
    assert batches.stats().bytes_by_origin["prepared"] == 0
    assert (
        sum(called.values()) == COUNT + shards * COUNT + 2 * 3
    )  # and their costs, and those that were tried twice


@pytest.mark.parametrize("shard", ["3", "3/3", "-1/3", "a/b", "0/0"])
def test_no_shard_is_a_usage_error(shard: str) -> None:
    assert run(["prepare", "/data", *WITH, "--shard", shard]) == 2


@pytest.mark.slow
def test_uneven_samples_are_estimated_by_the_first_ones_and_prepared(
    daemon: Daemon, tmp_path: Path, capsys: Any
) -> None:
    uneven = ["--with", "tests.loader.prepare.pictures:spelled", "--max-bytes", str(SPELLED_BYTES), "--json"]
    assert run(["prepare", str(tmp_path / "data"), *uneven, "--workers", "2"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    (estimated,) = (row for row in rows if row.get("event") == "estimated")
    (done,) = (row for row in rows if row.get("event") == "prefetched")
    assert done["resident_bytes"] == done["size_bytes"] < COUNT * SPELLED_BYTES
    assert 0.9 < estimated["size_bytes"] / done["size_bytes"] < 1.1


@pytest.mark.slow
def test_what_does_not_fit_is_told_before_anything_is_prepared(
    daemon: Daemon, tmp_path: Path, capsys: Any
) -> None:
    arguments = ["prepare", str(tmp_path / "data"), "--with", "tests.loader.prepare.pictures:doubled"]
    assert run(arguments) == 8
    assert "does not fit" in capsys.readouterr().err
    assert run([*arguments, "--shard", "0/2"]) == 8
    assert "shard 0/2 does not fit" in capsys.readouterr().err
    assert max(calls(tmp_path / "calls").values()) == 4  # twice in the trial, once for each estimate
