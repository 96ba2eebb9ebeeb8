"""Workers that die: others take their place, and a sample that kills its worker twice becomes that sample's error."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cachesvc.core.errors import CorruptData
from loader import DataLoader
from tests.support import datasets
from tests.support.training.loader_fakes import MemoryLink, compiled, in_memory

COUNT, DEADLY = 64, (5, 40)


@pytest.fixture(scope="module")
def link(tmp_path_factory: pytest.TempPathFactory) -> MemoryLink:
    root = tmp_path_factory.mktemp("numbers")
    datasets.array_file(root / "r.bin", np.arange(COUNT, dtype="<i8"))
    return compiled(root / "r.bin", root, format="records", dtype="<i8")


def killing(sample: torch.Tensor) -> int:
    if int(sample) in DEADLY:
        os.kill(os.getpid(), signal.SIGKILL)
    return int(sample)


def exiting(sample: torch.Tensor) -> int:
    if int(sample) in DEADLY:
        sys.exit(3)
    return int(sample)


def read(batches: DataLoader) -> tuple[list[int], list[str]]:
    """Return the samples of an epoch, and the errors that came in place of batches."""
    found: list[int] = []
    errors: list[str] = []
    reading = iter(batches)
    while True:
        try:
            found += next(reading)
        except StopIteration:
            return found, errors
        except CorruptData as error:
            errors.append(str(error))


@pytest.mark.parametrize("transform", [killing, exiting])
@pytest.mark.parametrize("given", [{"num_workers": 1}, {"num_workers": 3, "persistent_workers": True}])
def test_a_sample_that_kills_its_worker_twice_is_that_samples_error(
    link: MemoryLink, transform: Any, given: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    data = in_memory(link, transform=transform)
    batches = DataLoader(data, 4, shuffle=True, collate_fn=list, **given)
    plain = [
        *DataLoader(in_memory(link), 4, shuffle=True, collate_fn=lambda each: [int(one) for one in each])
    ]
    bad = [batch for batch in plain if set(batch) & set(DEADLY)]
    found, errors = read(batches)
    assert found == [one for batch in plain if batch not in bad for one in batch]
    assert len(errors) == len(bad)
    assert all(any(f"r.bin:{each} ended the worker" in error for each in DEADLY) for error in errors)
    assert sum("another takes its place" in told for told in caplog.messages) >= 2
    if given.get("persistent_workers"):  # the next epoch knows them
        caplog.clear()
        assert len(read(batches)[1]) in (1, 2)
        # A worker may have begun the sample before another's death made it known; its own is noticed in this epoch.
        assert len(caplog.messages) < given["num_workers"]


def test_such_a_sample_is_left_out_on_request(link: MemoryLink) -> None:
    data = in_memory(link, transform=killing)
    batches = DataLoader(data, 4, shuffle=True, collate_fn=list, num_workers=2, on_error="skip")
    found, errors = read(batches)
    assert (sorted(found), errors) == ([each for each in range(COUNT) if each not in DEADLY], [])
    assert sorted(bad.sample for bad in batches.bad_samples) == list(DEADLY)


def at_random(sample: torch.Tensor) -> int:
    if int.from_bytes(os.urandom(2), "little") < 65536 // 40:
        os.kill(os.getpid(), signal.SIGKILL)
    return int(sample)


def test_of_workers_that_die_now_and_then_each_sample_comes_at_most_once(link: MemoryLink) -> None:
    """A sample is missing only where two workers died of its batch."""
    batches = DataLoader(
        in_memory(link, transform=at_random), 4, shuffle=True, collate_fn=list, num_workers=3
    )
    found, errors = read(batches)
    assert max(Counter(found).values()) == 1
    assert len(found) == COUNT - 4 * len(errors)


def dies(number: int) -> None:
    os._exit(7)


def test_workers_that_die_at_their_start_end_the_iteration_in_torchs_words(
    link: MemoryLink, caplog: pytest.LogCaptureFixture
) -> None:
    batches = DataLoader(in_memory(link), 4, num_workers=2, worker_init_fn=dies)
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(RuntimeError, match=r"DataLoader worker.*unexpectedly"),
    ):
        list(batches)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_spawned_workers_are_replaced(link: MemoryLink, method: str, tmp_path: Path) -> None:
    batches = DataLoader(in_memory(link), 4, num_workers=2, multiprocessing_context=method)
    reading = iter(batches)
    found = next(reading).tolist()
    os.kill(batches._source._engine.processes[0].pid, signal.SIGKILL)  # type: ignore[union-attr]
    for batch in reading:
        found += batch.tolist()
    assert found == list(range(COUNT))
