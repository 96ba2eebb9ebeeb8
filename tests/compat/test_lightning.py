"""A job under Lightning, which counts batches, saves and restores loader states, and keeps our loader's own sampler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

COUNT, BATCH, RANKS = 100, 5, 2
EPOCH = COUNT // RANKS
"""Samples of one rank in an epoch."""
JOB_S = 600.0
"""The limit of a job of two ranks that import Lightning, on a busy machine."""

pytest.importorskip("pytorch_lightning", reason="no Lightning here: `make compat` installs it")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Record n holds n."""
    folder = tmp_path_factory.mktemp("lightning")
    np.save(folder / "rows.npy", np.arange(COUNT, dtype="<i8").reshape(COUNT, 1))
    return str(folder / "rows.npy")


def train(data: str, out: Path, sampler: str, checkpoint: str = "", limit: str = "") -> list[list[int]]:
    """Run the job; return the samples that each rank saw, in order."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.compat.runs.lightning_job",
            data,
            str(out),
            sampler,
            checkpoint,
            limit,
        ],
        env={**os.environ, "CACHESVC": "off", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=JOB_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(Path(f"{out}-{rank}.json").read_text()) for rank in range(RANKS)]


def test_epochs_are_complete_and_differ_and_resume_in_mid_epoch(data: str, tmp_path: Path) -> None:
    seen = train(data, tmp_path / "whole", "lightning")
    for epoch in range(2):
        assert sorted(n for rank in seen for n in rank[epoch * EPOCH :][:EPOCH]) == list(range(COUNT))
    assert all(rank[:EPOCH] != rank[EPOCH:] for rank in seen)
    (middle,) = (tmp_path / "whole-saved").glob("*step=5.ckpt")
    resumed = train(data, tmp_path / "resumed", "ours", str(middle))
    assert resumed == [rank[5 * BATCH :] for rank in seen]


@pytest.mark.slow
def test_a_checkpoint_at_an_epochs_end_resumes_with_the_next_epoch(data: str, tmp_path: Path) -> None:
    seen = train(data, tmp_path / "whole", "ours")
    (end,) = (tmp_path / "whole-saved").glob("end-epoch=0.ckpt")
    resumed = train(data, tmp_path / "after", "ours", str(end))
    assert resumed == [rank[EPOCH:] for rank in seen]


@pytest.mark.slow
def test_epochs_that_are_cut_short_differ(data: str, tmp_path: Path) -> None:
    seen = train(data, tmp_path / "short", "ours", limit="3")
    assert all(len(rank) == 2 * 3 * BATCH for rank in seen)
    assert all(rank[: 3 * BATCH] != rank[3 * BATCH :] for rank in seen)
