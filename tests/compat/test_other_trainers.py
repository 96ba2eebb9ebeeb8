"""Loops and trainers with checkpoints of their own: what two ranks see in a run that is cut in its second epoch of three
and resumed in other processes, on two ranks and on one, compared with an uninterrupted run."""

from __future__ import annotations

import importlib.util
import json
import warnings
from pathlib import Path

import pytest
import torch

from loader import DataLoader, open_dataset
from tests.compat.launch import numbered, ran, torchrun
from tests.compat.ledger import BATCH, EPOCHS, RANKS, STOP

COUNT = 203
STEPS = -(-COUNT // (BATCH * RANKS))
"""Steps of an epoch; the last one is not full."""
EACH = (STEPS - 1) * BATCH + 2
"""Samples of a rank in an epoch: the last three are given out as two and two, one of them a repeat."""
TRAINERS = {
    "DDP": ("plain_runs", "torch"),
    "FSDP2": ("plain_runs", "torch"),
    "SFTTrainer": ("sft_runs", "trl"),
    "DeepSpeed, ZeRO 1": ("deepspeed_runs", "deepspeed"),
    "DeepSpeed, ZeRO 2": ("deepspeed_runs", "deepspeed"),
    "Ray Train": ("", "ray"),
    "torchtitan": ("titan_runs", "torchtitan"),
}
"""The module of each trainer's runs under torchrun, and the package that it needs. Ray starts its ranks itself."""


def phase_of(name: str, phase: str, ranks: int, rows: Path) -> list[list[int]]:
    """Run one phase; return the samples that each rank saw, in order."""
    folder, runs = rows.parent, TRAINERS[name][0]
    job = ["-m", "tests.compat.runs.ray_job", str(ranks)]
    if runs:
        job = [*torchrun(ranks), "-m", "tests.compat.runs.ledger_job", runs, name]
    ran(*job, phase, str(rows), str(folder))
    return [json.loads((folder / f"{phase}-{rank}.json").read_text()) for rank in range(ranks)]


def steps_of(rank: list[int], width: int) -> list[list[int]]:
    """The batches of one rank: full ones, and each epoch's last."""
    size = len(rank) // EPOCHS
    epochs = [rank[number * size :][:size] for number in range(EPOCHS)]
    return [epoch[first:][:width] for epoch in epochs for first in range(0, size, width)]


@pytest.mark.parametrize("name", TRAINERS)
def test_a_run_that_is_cut_in_mid_epoch_sees_each_sample_once(name: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(TRAINERS[name][1]) is None:
        pytest.skip(f"no {TRAINERS[name][1]} here: `make compat` installs it")
    rows = numbered(tmp_path / "rows.npy", COUNT)
    whole, cut, rest = (phase_of(name, phase, RANKS, rows) for phase in ("whole", "cut", "rest"))
    for epoch in range(EPOCHS):
        seen = [number for rank in whole for number in rank[epoch * EACH :][:EACH]]
        assert sorted(set(seen)) == list(range(COUNT))
        assert len(seen) == COUNT + 1  # the repeat
    assert [before + after for before, after in zip(cut, rest, strict=True)] == whole
    assert all(len(rank) == EACH + (STOP - STEPS) * BATCH for rank in cut)
    (alone,) = phase_of(name, "other", 1, rows)
    steps = [first + second for first, second in zip(*(steps_of(rank, BATCH) for rank in whole), strict=True)]
    real = [step[: COUNT % (BATCH * RANKS)] if len(step) < BATCH * RANKS else step for step in steps]
    assert alone == [number for step in real[STOP:] for number in step]


def test_the_wrapper_of_ray_warns_of_the_batch_that_it_takes_early(tmp_path: Path) -> None:
    """Twice in one place of a program, one warning; with what it says to write, none."""
    train = pytest.importorskip(
        "ray.train.torch.train_loop_utils", reason="no ray here: `make compat` installs it"
    )
    batches = DataLoader(open_dataset(numbered(tmp_path / "rows.npy", 12)), 4)
    wrapped = train._WrappedDataLoader(batches, torch.device("cpu"), False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(2):
            assert len([*wrapped]) == 3
        assert len([*batches]) == 3
    found = [each for each in caught if "move_to_device=False" in str(each.message)]
    assert [each.filename for each in found] == [__file__]
