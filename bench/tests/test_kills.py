"""The kill drill in short form, its ledger and its audit. The long drill is `make kills`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench.kills.audit import Audit, differing
from bench.kills.ledger import Entry, Reader, Writer
from testbed import ROOT

LATE = 2
"""The drill's exit code when starts took too long and nothing else was wrong."""


def entry(step: int, *indices: int, epoch: int = 0) -> Entry:
    return Entry(epoch, list(indices), [str(index) for index in indices], {"step": step})


def drill(kills: int, seed: int, limit_s: float, *more: int) -> None:
    """Run the drill, which must end with code 0 or one of `more`."""
    command = [sys.executable, "-m", "bench.kills", str(kills), str(seed)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit_s)
    assert done.returncode in (0, *more), done.stdout + done.stderr


@pytest.mark.slow
def test_a_few_kills_lose_and_duplicate_nothing_and_leave_nothing_behind() -> None:
    drill(6, 1, 280.0, LATE)  # starts may be late beside other tests


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(600)
def test_many_kills_lose_and_duplicate_nothing_and_leave_nothing_behind() -> None:
    drill(120, 2, 580.0, LATE)


def test_a_ledger_line_cut_by_a_kill_counts_as_not_written(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    writer, reader = Writer(str(path)), Reader(path)
    assert writer.latest() is None
    writer.commit(entry(1, 0, 1))
    whole = path.read_bytes()
    for cut in (5, len(whole) // 2, len(whole) - 2):
        with open(path, "ab") as file:
            file.write(whole[:cut])
        assert Writer(str(path)).latest() == entry(1, 0, 1)
        Writer(str(path)).commit(entry(1, 0, 1))
    assert len(list(reader)) == 4
    assert reader.torn == 3
    reader.close()


def test_the_audit_finds_duplicate_missing_wrong_and_reordered_samples() -> None:
    def audit(*entries: Entry) -> Audit:
        found = Audit("run", ["0", "1", "2", "3"])
        for each in entries:
            found.add(each)
        return found

    good = audit(entry(1, 0, 1), entry(2, 3, 2), entry(1, 2, 1, epoch=1))
    assert not good.faults
    assert not good.between_epochs
    assert "1 samples twice, 1 never" in audit(entry(1, 0, 1), entry(2, 1, 2)).faults[0]
    assert "went to epoch 1 after 2 samples" in audit(entry(1, 0, 1), entry(1, 0, 1, epoch=1)).faults[0]
    assert "other bytes" in audit(Entry(0, [0], ["1"], {})).faults[0]
    assert differing([good, audit(entry(1, 0, 1), entry(2, 3, 2))]) == []
    assert differing([good, audit(entry(1, 0, 1), entry(2, 2, 3))]) == ["epoch 0 came in 2 orders"]
