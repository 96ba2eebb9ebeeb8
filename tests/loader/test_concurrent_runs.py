"""Several iterations of one dataset at the same time: a validation inside a training epoch."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cachesvc.client.control import Control
from cachesvc.client.grants import DaemonGrants
from loader import DataLoader, Dataset, open_dataset
from testbed.node import Daemon
from tests.support.waiting import wait_until

RECORD, EACH, EXTENTS, FIT = 4096, 16, 240, 72
"""Bytes of a record, records of an extent, extents, and how many of them the cache holds."""
STEP_S = 0.005


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Dataset]:
    (tmp_path / "records.bin").write_bytes(os.urandom(RECORD * EACH * EXTENTS))
    size = EACH * RECORD
    options = ["--ram", str(FIT * size), "--extent-bytes", str(size), "--allow", f"{tmp_path}/"]
    with Daemon(tmp_path / "node", options) as node:
        monkeypatch.setenv("CACHESVC_SOCKET", node.socket_dir)
        monkeypatch.setenv("CACHESVC", "require")
        yield open_dataset(str(tmp_path / "records.bin"), format="records", record_bytes=RECORD)


def ahead() -> int:
    """Reads of extents that were filled ahead, by a plan."""
    with Control() as control:
        return int(control.status().datasets[0].ahead)


def readers() -> int:
    with Control() as control:
        return int(control.status().datasets[0].readers)


def steps(batches: Iterator[object], count: int) -> None:
    for _ in range(count):
        next(batches)
        time.sleep(STEP_S)  # a training step


def train_and_validation(data: Dataset) -> tuple[DataLoader[Any], DataLoader[Any]]:
    parts = data.split({"train": 0.9, "val": 0.1}, seed=1)
    train = DataLoader(parts["train"], EACH, shuffle=True, window=4 * EACH * RECORD, drop_last=True)
    return train, DataLoader(parts["val"], EACH)


@pytest.mark.slow
def test_a_validation_does_not_replace_the_plan_of_the_training(data: Dataset) -> None:
    train, validation = train_and_validation(data)
    running = iter(train)
    steps(running, 80)
    assert readers() == 1
    for number, _ in enumerate(validation):
        assert number or readers() == 2  # the validation has its own connection
    wait_until(lambda: readers() == 1)
    before = ahead()
    steps(running, len(train) - 80)
    assert ahead() > before
    assert len(list(validation)) == len(list(validation))
    wait_until(lambda: readers() == 1)  # no other order runs, so it uses the reader's connection


def test_an_abandoned_validation_leaves_the_connection_to_the_training(data: Dataset) -> None:
    train, validation = train_and_validation(data)
    next(iter(validation))  # like a sanity check before the training
    running = iter(train)
    steps(running, 80)
    assert readers() == 1
    before = ahead()
    assert before > 0
    steps(running, len(train) - 80)
    assert ahead() > before


def connections() -> int:
    gc.collect()
    return sum(isinstance(each, DaemonGrants) for each in gc.get_objects())


def test_validations_in_mid_epoch_do_not_accumulate_connections(data: Dataset) -> None:
    others = connections()
    running = iter(DataLoader(data, EACH, shuffle=True))
    validation = DataLoader(data.take(2 * EACH), EACH)
    next(running)
    for _ in range(4):
        assert len(list(validation)) == 2
    next(running)
    assert connections() == others + 1
    data.opened.close()


def test_abandoned_orders_leave_no_connection(data: Dataset) -> None:
    running = iter(DataLoader(data, EACH, shuffle=True))
    next(running)
    other = iter(DataLoader(data, EACH))
    next(other)
    assert readers() == 2
    del other
    gc.collect()
    wait_until(lambda: readers() == 1)
    next(running)
    data.opened.close()
    wait_until(lambda: readers() == 0)


@pytest.mark.parametrize("left_early", [False, True])
def test_a_dropped_dataset_ends_its_claim_without_the_garbage_collector(
    data: Dataset, tmp_path: Path, left_early: bool
) -> None:
    records = tmp_path / "records.bin"
    gc.collect()
    gc.disable()
    try:
        opened = open_dataset(str(records), format="records", record_bytes=RECORD)
        batches = iter(DataLoader(opened.take(4 * EACH), EACH, shuffle=True))
        for _ in range(1 if left_early else 4):
            next(batches)
        assert readers() == 1
        assert left_early or next(batches, None) is None
        del opened, batches
        wait_until(lambda: readers() == 0)
    finally:
        gc.enable()
