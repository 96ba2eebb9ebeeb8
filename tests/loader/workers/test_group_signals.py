"""Signals that a launcher sends to all processes of a job: workers outlive them, and end with their trainer."""

from __future__ import annotations

import copy
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from multiprocessing.context import ForkProcess, SpawnProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cachesvc.system.group_signals import GROUP_SIGNALS, held_back
from loader import DataLoader
from testbed import WAIT_S
from testbed.forked import TRAINER, ForkedProcess
from tests.support.training.loader_fakes import MemoryLink, in_memory

COUNT = 200


def numbers(batches: Any) -> list[int]:
    return [int(n) for batch in batches for n in batch[:, 0]]


def workers_of(loader: DataLoader) -> list[Any]:
    return list(loader._source._engine.processes)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"persistent_workers": True},
        pytest.param({"multiprocessing_context": "spawn"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_workers_outlive_signals_to_the_group(link: MemoryLink, given: dict[str, Any]) -> None:
    loader = DataLoader(in_memory(link), 4, num_workers=2, **given)
    batches = iter(loader)
    found = numbers([next(batches)])
    for number in GROUP_SIGNALS:
        for worker in workers_of(loader):
            os.kill(worker.pid, number)
    assert found + numbers(batches) == list(range(COUNT))


def ended_by(sample: Any) -> Any:
    """Return the exit code of a program that sends SIGTERM to itself."""
    return subprocess.run(["sh", "-c", "kill -TERM $$"], check=False).returncode


def test_programs_that_a_worker_starts_end_by_them(link: MemoryLink) -> None:
    data = in_memory(link, transform=ended_by).take(1)
    assert next(iter(DataLoader(data, 1, num_workers=1))).tolist() == [-signal.SIGTERM]


class SpawnedAndSignalled(SpawnProcess):
    """A process that gets SIGTERM as soon as it exists, long before it runs code of ours."""

    def start(self) -> None:
        super().start()
        os.kill(self.pid or 0, signal.SIGTERM)


class ForkedAndSignalled(ForkProcess):
    """A process that gets all these signals as soon as it exists."""

    def start(self) -> None:
        super().start()
        for number in GROUP_SIGNALS:
            os.kill(self.pid or 0, number)


@pytest.mark.parametrize(
    ("start", "kind"),
    [("fork", ForkedAndSignalled), pytest.param("spawn", SpawnedAndSignalled, marks=pytest.mark.slow)],
)
def test_a_worker_outlives_a_signal_while_it_starts(link: MemoryLink, start: str, kind: type) -> None:
    context: Any = copy.copy(multiprocessing.get_context(start))
    context.Process = kind
    loader = DataLoader(in_memory(link), 4, num_workers=1, multiprocessing_context=context)
    assert numbers(loader) == list(range(COUNT))


def test_signals_wait_for_the_thread_that_starts_workers() -> None:
    arrived: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: arrived.append(number))
    try:
        with held_back():
            signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
            inside = list(arrived)
        assert (inside, arrived) == ([], [signal.SIGUSR1])
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_terminate_ends_a_worker(link: MemoryLink) -> None:
    """A program may so end all children of its own, which then must not wait for ever."""
    loader = DataLoader(in_memory(link), 4, num_workers=1)
    batches = iter(loader)
    next(batches)
    (worker,) = workers_of(loader)
    worker.terminate()
    worker.join(WAIT_S)
    assert worker.exitcode == -signal.SIGKILL


TRAIN = """
import os, signal, sys
from loader import DataLoader, open_dataset
stop = []
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
workers = {"num_workers": 2, "persistent_workers": True, "multiprocessing_context": sys.argv[2]}
batches = DataLoader(open_dataset(sys.argv[1]), 4, **workers)
steps = 0
for batch in batches:
    steps += 1
    if steps == 2:
        print("runs", flush=True)
        sys.stdin.readline()
    if stop:
        break
print(steps == batches.state_dict()["step"], bool(stop), flush=True)
"""


@pytest.mark.parametrize("start", ["fork", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_a_trainer_saves_after_sigterm_to_its_group(tmp_path: Path, start: str) -> None:
    np.save(tmp_path / "a.npy", np.zeros((400, 4)))
    code = f"import os; os.setpgid(0, 0)\n{TRAIN}"
    trainer = ForkedProcess(
        [sys.executable, "-c", code, str(tmp_path), start],
        env=os.environ | {"CACHESVC": "off", "XDG_CACHE_HOME": str(tmp_path / "cache")},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        preloaded=TRAINER,
    )
    assert trainer.stdin is not None
    assert trainer.stdout is not None
    assert trainer.stdout.readline() == "runs\n"
    os.killpg(trainer.pid, signal.SIGTERM)
    trainer.stdin.write("\n")
    trainer.stdin.flush()
    assert trainer.stdout.readline() == "True True\n"
    assert trainer.wait(WAIT_S) == 0, "its exit waits for workers, which persist until then"
