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
from tests.loader.prepare.pictures import COUNT, calls, half, write_pictures

WITH = ["--with", "tests.loader.prepare.pictures:half", "--workers", "2", "--json"]


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    write_pictures(tmp_path / "data")
    options = ["--ram", "256KiB", "--extent-bytes", "16384", "--fillers", "1", "--allow", f"{tmp_path}/data"]
    monkeypatch.setenv("CACHESVC", "require")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    with Daemon(tmp_path / "node", options) as found:
        monkeypatch.setenv("CACHESVC_SOCKET", found.socket_dir)
        yield found


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
def test_what_does_not_fit_is_told_before_anything_is_prepared(
    daemon: Daemon, tmp_path: Path, capsys: Any
) -> None:
    arguments = ["prepare", str(tmp_path / "data"), "--with", "tests.loader.prepare.pictures:doubled"]
    assert run(arguments) == 8
    assert "does not fit" in capsys.readouterr().err
    assert max(calls(tmp_path / "calls").values()) == 3  # twice in the trial, once for its cost
