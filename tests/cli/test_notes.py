"""Each verb that opens a dataset prints its notes on stderr, and stdout stays the same."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from cachesvc.__main__ import run
from cachesvc.cli.output import MAX_NOTES, print_notes
from testbed.node import Daemon

RECORDS = ["--format", "records", "--record-bytes", "4096"]


@pytest.fixture
def data(plain: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write two records and a part of a third."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "0.bin").write_bytes(os.urandom(2 * 4096 + 7))
    return tmp_path / "data"


def said(capsys: Any, arguments: list[str]) -> list[str]:
    """Return the lines on stderr of a successful verb."""
    capsys.readouterr()
    assert run(arguments) == 0
    return [line for line in capsys.readouterr().err.splitlines() if "warning" in line]


@pytest.mark.slow
def test_a_left_out_tail_is_noted_with_a_daemon_at_each_opening(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    with Daemon(
        tmp_path / "node", ["--ram", "6MiB", "--extent-bytes", "1MiB", "--allow", str(tmp_path)]
    ) as daemon:
        monkeypatch.setenv("CACHESVC_SOCKET", daemon.socket_dir)
        for verb in ("prefetch", "prefetch", "index", "estimate", "pin"):
            (line,) = said(capsys, [verb, *RECORDS, str(data)])
            assert line.startswith("warning: file://")
            assert line.endswith("0.bin: the last 7 bytes are no whole sample and left out")
            (line,) = said(capsys, [verb, "--json", *RECORDS, str(data)])
            assert "the last 7 bytes" in json.loads(line)["warning"]


def test_a_left_out_tail_is_noted_without_a_daemon(data: Path, capsys: Any) -> None:
    (line,) = said(capsys, ["index", *RECORDS, str(data)])
    assert line.startswith("warning: ")
    (line,) = said(capsys, ["find", "--json", *RECORDS, str(data), "key == 'x'"])
    assert "the last 7 bytes" in json.loads(line)["warning"]


def test_many_notes_are_cut_to_a_few_lines(capsys: Any) -> None:
    print_notes([f"note\n{n}" for n in range(MAX_NOTES + 3)], as_json=False)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "warning: note 0"
    assert lines[MAX_NOTES:] == ["warning: and 3 notes more, in ds.catalog.notes"]
