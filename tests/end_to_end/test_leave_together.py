"""examples/leave_together.py: one rank is told to leave, all save at the same step, another number of ranks goes on, and
both ledgers together have each sample once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cachesvc.__main__ import run as cachesvc
from testbed import ROOT, WAIT_S
from testbed.servers import free_ports
from tests.support.waiting import wait_until

SAMPLES, RECORD = 20_004, 64


def started(data: Path, folder: Path, world: int) -> list[subprocess.Popen[bytes]]:
    (port,) = free_ports(1)
    command = [sys.executable, str(ROOT / "examples" / "leave_together.py"), str(data), str(folder)]
    common = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world)}
    common |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return [subprocess.Popen(command, env=common | {"RANK": str(rank)}) for rank in range(world)]


def ended(ranks: list[subprocess.Popen[bytes]]) -> list[int]:
    try:
        return [rank.wait(WAIT_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def ledger(folder: Path, run: int, rank: int) -> list[list[int]]:
    return [json.loads(line) for line in (folder / f"ledger-{run}-{rank}.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_both_runs_together_read_each_sample_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in os.environ if name.startswith("CACHESVC")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("CACHESVC", "off")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    data, folder = tmp_path / "data.bin", tmp_path / "checkpoints"
    data.write_bytes(os.urandom(SAMPLES * RECORD))
    folder.mkdir()
    ranks = started(data, folder, 2)
    first = folder / "ledger-0-0.jsonl"
    try:
        wait_until(lambda: first.exists() and first.read_text().count("\n") > 3, WAIT_S)
        ranks[1].send_signal(signal.SIGTERM)
    finally:
        codes = ended(ranks)
    assert codes == [0, 0]
    taken = [ledger(folder, 0, rank) for rank in range(2)]
    state = json.loads((folder / "loader.json").read_text())
    assert len(taken[0]) == len(taken[1]) == state["data_step"] < SAMPLES // 8, (
        "it left at one step, before the end"
    )
    assert ended(started(data, folder, 1)) == [0]
    taken.append(ledger(folder, 1, 0))
    assert sorted(index for ranks_ in taken for batch in ranks_ for index in batch) == [*range(SAMPLES)]
    capsys.readouterr()
    assert cachesvc(["order", "--state", str(folder / "loader.json"), "--digest", "--fetch"]) == 0
    assert "as the state has it" in capsys.readouterr().out
