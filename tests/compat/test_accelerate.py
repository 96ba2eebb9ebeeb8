"""A job under Accelerate, whose checkpoints contain a prepared loader's state."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from loader import DataLoader, open_dataset

COUNT, RANKS = 100, 2
JOB_S = 600.0
"""The limit of a job of two ranks on a busy machine."""


def train(data: Path, out: Path, checkpoint: str, stop: int) -> list[list[int]]:
    """Run the job; return the samples that each rank saw, in order."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    done = subprocess.run(
        [*launch, "-m", "tests.compat.runs.accelerate_job", str(data), str(out), checkpoint, str(stop)],
        env={**os.environ, "CACHESVC": "off", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=JOB_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(Path(f"{out}-{rank}.json").read_text()) for rank in range(RANKS)]


def test_a_job_resumes_from_a_checkpoint_in_mid_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "rows.npy"
    np.save(data, np.arange(COUNT, dtype="<i8").reshape(COUNT, 1))
    begun = train(data, tmp_path / "begun", "", 4)
    rest = train(data, tmp_path / "rest", f"{tmp_path}/begun-saved", 0)
    monkeypatch.setenv("CACHESVC", "off")
    rows = open_dataset(data)
    ranks = [DataLoader(rows, 5, shuffle=True, rank=rank, world_size=RANKS) for rank in range(RANKS)]
    whole = [[n for batch in batches for n in batch[:, 0].tolist()] for batches in ranks]
    assert [one + other for one, other in zip(begun, rest, strict=True)] == whole
    assert sorted(n for rank in whole for n in rank) == list(range(COUNT))
    assert min(map(len, begun + rest)) > 0
