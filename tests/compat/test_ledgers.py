"""Other projects' trainers over our loader: samples that two ranks see in a run that is interrupted in its second epoch
and resumed in other processes, on two ranks and on one, compared with an uninterrupted run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.compat.launch import numbered, ran, torchrun
from tests.compat.ledger import BATCH, EPOCHS, RANKS, STOP

for name in ("accelerate", "pytorch_lightning", "transformers"):
    pytest.importorskip(name, reason=f"no {name} here: `make compat` installs it")

COUNT = 203
STEPS = -(-COUNT // (BATCH * RANKS))
"""Steps of an epoch; the last one is not full."""
DONE_STEPS = STOP - STEPS
"""Steps of the second epoch before the interruption."""
Ledgers = list[dict[str, Any]]
"""For each rank, the samples that it saw by the name of the run."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Ledgers, Ledgers, Ledgers]:
    """Ledgers before the interruption, after it, and after it on one rank. Record n holds n."""
    folder = tmp_path_factory.mktemp("ledgers")
    rows = numbered(folder / "rows.npy", COUNT)
    numbered(Path(f"{rows}.1000.npy"), 1000)
    phases = {"first": RANKS, "again": RANKS, "other": 1}
    for phase, ranks in phases.items():
        ran(*torchrun(ranks), "-m", "tests.compat.runs.job", str(rows), str(folder), phase)
    first, again, other = (
        [json.loads((folder / f"{phase}-{rank}.json").read_text()) for rank in range(ranks)]
        for phase, ranks in phases.items()
    )
    return first, again, other


WHOLE = ("Lightning, with their sampler", "Lightning, without their sampler", "Fabric, with their sampler",
         "Fabric, without their sampler", "Accelerate", "Trainer, override", "Trainer, train_dataset")  # fmt: skip
RESUMED = {
    **{name: name for name in WHOLE[:4]},
    "Accelerate, prepare": "Accelerate",
    "Accelerate, skip_first_batches, with the state": "Accelerate",
    "Accelerate, skip_first_batches, without the state": "Accelerate",
    "Trainer, override, with the state, ignore_data_skip=False": "Trainer, override",
    "Trainer, override, without the state, ignore_data_skip=False": "Trainer, override",
    "Trainer, override, with the state, ignore_data_skip=True": "Trainer, override",
    "Trainer, train_dataset, ignore_data_skip=False": "Trainer, train_dataset",
}
RESTARTED = {
    "Trainer, override, without the state, ignore_data_skip=True": "Trainer, override",
    "Trainer, train_dataset, ignore_data_skip=True": "Trainer, train_dataset",
}


@pytest.mark.parametrize("name", WHOLE)
def test_every_epoch_has_every_sample(runs: tuple[Ledgers, Ledgers, Ledgers], name: str) -> None:
    first, _, _ = runs
    each = len(first[0][name]) // EPOCHS
    assert COUNT <= each * RANKS <= STEPS * BATCH * RANKS
    for epoch in range(EPOCHS):
        seen = {number for rank in first for number in rank[name][epoch * each :][:each]}
        assert seen == set(range(COUNT))


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_continues_with_the_unseen_samples(
    runs: tuple[Ledgers, Ledgers, Ledgers], name: str
) -> None:
    first, again, _ = runs
    for before, after in zip(first, again, strict=True):
        whole = before[RESUMED[name]]
        done = len(whole) // EPOCHS + DONE_STEPS * BATCH
        begun = before.get(f"{RESUMED[name]}, begun", whole[:done])  # Lightning's run continued to its end
        assert len(begun) == done
        assert begun + after[name] == whole


ELASTIC = [name for name in RESUMED if "train_dataset" not in name]
"""Runs over a loader of ours. Trainer's own loader gives other samples at another number of ranks."""


@pytest.mark.parametrize("name", ELASTIC)
def test_a_run_resumed_on_one_rank_continues_with_the_unseen_samples(
    runs: tuple[Ledgers, Ledgers, Ledgers], name: str
) -> None:
    first, _, (alone,) = runs
    steps: list[list[int]] = []
    for epoch in range(EPOCHS):
        each = [rank[RESUMED[name]] for rank in first]
        size = len(each[0]) // EPOCHS
        parts = [rank[epoch * size :][:size] for rank in each]
        steps += [[n for part in parts for n in part[at : at + BATCH]] for at in range(0, size, BATCH)]
        steps[-1] = steps[-1][: COUNT % (BATCH * RANKS)]  # the last step, without its repeat
    assert alone[name] == [number for step in steps[STOP:] for number in step]


@pytest.mark.parametrize("name", RESTARTED)
def test_with_ignore_data_skip_and_no_state_a_trainer_restarts_the_epoch(
    runs: tuple[Ledgers, Ledgers, Ledgers], name: str
) -> None:
    first, again, _ = runs
    for before, after in zip(first, again, strict=True):
        whole = before[RESTARTED[name]]
        second = len(whole) // EPOCHS
        third = (STEPS - DONE_STEPS) * BATCH  # the run ends after the same number of steps in all
        assert after[name] == whole[second:][: second + third]


@pytest.mark.parametrize("name", ["predict, with their sampler", "predict, without their sampler"])
def test_lightning_predicts_each_sample_once(runs: tuple[Ledgers, Ledgers, Ledgers], name: str) -> None:
    first, _, _ = runs
    assert sorted(number for rank in first for number in rank[name]) == list(range(COUNT))


def test_trainer_evaluates_each_sample_once(runs: tuple[Ledgers, Ledgers, Ledgers]) -> None:
    for rank in runs[0]:
        assert (rank["evaluate"]["eval_predictions"], rank["evaluate"]["eval_samples"]) == (1000, 1000)
