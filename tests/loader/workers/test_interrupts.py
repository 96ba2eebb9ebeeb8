"""Ctrl-C at any line of the loader during an epoch: the loader then delivers every sample, and nothing hangs."""

from __future__ import annotations

import itertools
import linecache
import os
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import cachesvc
import loader
from loader import DataLoader
from tests.support import datasets
from tests.support.training.loader_fakes import MemoryLink, compiled, in_memory

COUNT = 91
ENTER = threading.Condition.__enter__.__code__
OURS = tuple(os.path.dirname(str(module.__file__)) + os.sep for module in (loader, cachesvc))


class Interrupt:
    """A trace function that raises KeyboardInterrupt at the n-th line of the loader's code that this process runs."""

    def __init__(self, line: int) -> None:
        self._left, self._process = line, os.getpid()
        self.at = ""

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename.startswith(OURS):
            return self._line
        caller = frame.f_back
        if frame.f_code is ENTER and caller is not None and caller.f_code.co_filename.startswith(OURS):
            return self._entered
        return None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        # The end of a `with` is traced again before it releases a lock; Python handles no signals there.
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and not line.strip().startswith("with "):
            self._pass(frame)
        return self._line

    def _entered(self, frame: FrameType, event: str, argument: Any) -> Any:
        # A Condition's methods are Python code: signals are handled in them while the lock is taken.
        if event == "return":
            self._pass(frame)
        return self._entered

    def _pass(self, frame: FrameType) -> None:
        self._left -= 1
        if self._left <= 0 and os.getpid() == self._process:
            sys.settrace(None)
            self.at = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def link(tmp_path_factory: pytest.TempPathFactory) -> MemoryLink:
    root: Path = tmp_path_factory.mktemp("interrupted")
    datasets.array_file(root / "r.bin", np.arange(COUNT * 128, dtype="<i8").reshape(COUNT, 128))
    return compiled(root / "r.bin", root, format="records", dtype="(128,)i8", extent_bytes=4096)


def numbers(batches: DataLoader) -> list[int]:
    return [int(first) // 128 for batch in batches for first in batch[:, 0]]


def interrupted(link: MemoryLink, line: int, workers: dict[str, Any]) -> str:
    """Interrupt an epoch at its `line`-th line, then run two more. Returns the place of the interrupt, "" past the
    end."""
    data = in_memory(link)
    batches, interrupt = DataLoader(data, batch_size=7, shuffle=True, **workers), Interrupt(line)
    sys.settrace(interrupt)
    try:
        for _ in batches:
            pass
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    rest = numbers(batches)
    assert len(set(rest)) == len(rest), interrupt.at
    assert sorted(numbers(batches)) == list(range(COUNT)), interrupt.at
    data.close()
    return interrupt.at


# the interrupt may be raised in a finalizer, too
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("workers", "step"),
    [
        pytest.param({}, 83, marks=pytest.mark.slow),
        pytest.param({"num_workers": 2, "worker_type": "thread"}, 61, marks=pytest.mark.slow),
        ({"num_workers": 1}, 397),
        pytest.param({}, 7, marks=pytest.mark.slow),
        pytest.param({"num_workers": 2, "worker_type": "thread"}, 17, marks=pytest.mark.slow),
        pytest.param({"num_workers": 1}, 67, marks=pytest.mark.slow),
    ],
)
def test_a_loader_works_after_an_interrupt_at_any_line(
    link: MemoryLink, workers: dict[str, Any], step: int
) -> None:
    for line in itertools.count(step, step):
        if not interrupted(link, line, workers):
            assert line > 1000, "most of an epoch was left out"
            return
