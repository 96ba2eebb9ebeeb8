"""Workers that are alive and send nothing are named once, with what may be the cause."""

from __future__ import annotations

import logging
import multiprocessing
from pathlib import Path

import numpy as np
import pytest
import torch

from loader import DataLoader
from loader.batches.maker import BatchMaker
from loader.workers.processes import ProcessEngine
from loader.workers.settings import WorkerSettings
from testbed import WAIT_S
from tests.support import datasets
from tests.support.training.loader_fakes import compiled, in_memory


class Waits:
    """A transform that waits for an event."""

    def __init__(self, start: str) -> None:
        self.event = multiprocessing.get_context(start).Event()

    def __call__(self, sample: torch.Tensor) -> int:
        assert self.event.wait(WAIT_S)
        return int(sample)


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_the_worker_that_owes_the_batch_is_named_once(tmp_path: Path, start: str) -> None:
    datasets.array_file(tmp_path / "r.bin", np.arange(4, dtype="<i8"))
    waits = Waits(start)
    data = in_memory(compiled(tmp_path / "r.bin", tmp_path, format="records", dtype="<i8"), transform=waits)
    loader = DataLoader(data, 4, num_workers=1, collate_fn=list)
    settings = WorkerSettings(num_workers=1, multiprocessing_context=multiprocessing.get_context(start))
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
        (worker,) = engine.processes
        assert engine.fetch((0, 0)).batch == [0, 1, 2, 3]
    finally:
        log.removeHandler(handler)
        engine.stop()
    assert len(told) == 1
    assert f"no batch for 0 s: pid {worker.pid}." in told[0]
    assert ("forked" in told[0]) == (start == "fork")
