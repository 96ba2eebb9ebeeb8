"""Workers that are alive and send nothing are named once, with what may be the cause."""

from __future__ import annotations

import logging
import multiprocessing
from typing import Any

import numpy as np
import pytest
import torch

from loader import DataLoader
from loader.batches.maker import BatchMaker
from loader.workers.silence import SILENT_S, Silence
from loader.workers.torch_processes import ProcessEngine
from testbed import WAIT_S
from tests.support import datasets
from tests.support.training.loader_fakes import compiled, in_memory


def test_a_wait_is_long_after_the_limit_without_a_message() -> None:
    silence = Silence(60.0)
    assert [silence.is_long(now) for now in (0.0, 59.0)] == [False, False]
    silence.heard()
    assert [silence.is_long(now) for now in (70.0, 129.0, 130.0)] == [False, False, True]


def test_silence_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    silence = Silence(SILENT_S)
    silence.is_long(0.0)
    silence.warn([7, 8], forked=True)
    assert not silence.is_long(1000.0)
    assert "no batch for 60 s: pid 7, 8" in caplog.text
    assert "worker_type='thread'" in caplog.text


def test_other_starts_than_fork_are_not_blamed(caplog: pytest.LogCaptureFixture) -> None:
    Silence(SILENT_S).warn([7], forked=False)
    assert "fork" not in caplog.text


class Waits:
    """A transform that waits for an event."""

    def __init__(self) -> None:
        self.event = multiprocessing.Event()

    def __call__(self, sample: torch.Tensor) -> int:
        assert self.event.wait(WAIT_S)
        return int(sample)


def test_the_worker_that_owes_the_batch_is_named(tmp_path: Any) -> None:
    datasets.array_file(tmp_path / "r.bin", np.arange(4, dtype="<i8"))
    waits = Waits()
    data = in_memory(compiled(tmp_path / "r.bin", tmp_path, format="records", dtype="<i8"), transform=waits)
    loader = DataLoader(data, 4, num_workers=1, collate_fn=list)
    settings = {"num_workers": 1, "prefetch_factor": 2, "multiprocessing_context": "fork"}
    engine = ProcessEngine(BatchMaker(loader._prepared().feed, "raise"), settings, silent_s=0.1)
    told: list[str] = []

    class Told(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(record.getMessage())
            waits.event.set()

    handler, log = Told(), logging.getLogger("cachesvc")
    log.addHandler(handler)
    try:
        engine.start(0, 0, 1)
        (worker,) = engine._batches._workers  # type: ignore[attr-defined]
        assert engine.fetch((0, 0)).batch == [0, 1, 2, 3]
    finally:
        log.removeHandler(handler)
        engine.stop()
    assert len(told) == 1
    assert f"pid {worker.pid}." in told[0]
