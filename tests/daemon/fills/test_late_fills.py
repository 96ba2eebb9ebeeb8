"""A filler answers when nobody is left who wanted the extent, and its dataset has been forgotten."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from cachesvc.core import commands, events
from cachesvc.core.model import DatasetId, ExtentId, ReaderId, TierName
from cachesvc.core.node.node import Node
from cachesvc.core.tiering.policy import NodeSettings, TierSpec
from cachesvc.daemon.datasets import (
    CACHED_EXTENTS,
    UNUSED,
    UNUSED_EXTENTS,
    Dataset,
    Datasets,
    Sealed,
    in_use,
    is_claimed,
)
from cachesvc.daemon.fills.checks import Checks
from cachesvc.daemon.fills.commits import Commits
from cachesvc.daemon.fills.fills import Fills
from cachesvc.daemon.fills.memory_admission import Work
from cachesvc.daemon.fills.missing_objects import Lacking
from cachesvc.daemon.processes import jobs

NVME = TierName("nvme0")


class AtOnce:
    """A tier's thread that has done everything already."""

    def submit(self, work: Callable[[], Any], then: Callable[[Any], None], _: Callable[[Any], None]) -> None:
        then(work())


def dataset(number: int) -> Dataset:
    extent = ExtentId(number.to_bytes(16, "big"))
    catalog: Any = SimpleNamespace(samples=1, layout=None)
    sealed = Sealed(os.open("/dev/null", os.O_RDONLY))
    name = DatasetId(f"{number:032x}")
    return Dataset(name, catalog, sealed, (extent,), (10,), ((extent, 10),), {extent: 0}, frozenset())


def test_the_answer_is_counted_and_nothing_else_happens(tmp_path: Path) -> None:
    node = Node([TierSpec(NVME, 1000)], NodeSettings())
    anything: Any = None
    datasets = Datasets(str(tmp_path), anything, anything, anything, anything)
    datasets.claimed, datasets.used = partial(is_claimed, node), partial(in_use, node)
    answers: list[Callable[[jobs.Answer], None]] = []
    tier: Any = SimpleNamespace(
        reserve=lambda *_: os.open("/dev/null", os.O_RDONLY), abort=lambda _: None, recover=dict, hold=None
    )
    fillers: Any = SimpleNamespace(submit=lambda job, fds, then, tiers: answers.append(then))
    lanes: Any = {NVME: AtOnce()}

    def handle(event: events.Event) -> None:
        for command in node.handle(event, 0.0):
            if isinstance(command, commands.StartFill):
                fills.start(command)

    checks = Checks(node, {NVME: tier}, lanes, fillers, handle, failing=lambda _: None)
    fills = Fills(
        {NVME: tier},
        lanes,
        Commits(lanes, lanes),
        datasets,
        fillers,
        checks,
        Lacking(lambda: 0.0),
        handle,
        Work(1 << 40, 1 << 40, None),
    )
    known = datasets.admit(dataset(1))
    handle(events.DatasetDeclared(7, known.id, known.extents))
    handle(events.Demanded(ReaderId(7), 1, known.extent_ids[0]))
    handle(events.TierLost(NVME))
    fills.tier_lost(NVME, "it hangs")
    handle(events.ReaderGone(ReaderId(7)))
    handle(events.JobEnded(7))
    for number in range(UNUSED + 1):
        datasets.admit(dataset(2 + number))
    assert datasets.known(known.id) is None
    (late,) = answers
    late(jobs.Done(1, 0, "", source_bytes=10))
    assert fills.source_bytes(known.id) == 10
    assert node.where(known.extent_ids[0]) is None
    datasets.close()


def test_what_was_read_for_somebody_who_went_away_is_let_go_of(tmp_path: Path) -> None:
    anything: Any = None
    sealed: list[int] = []

    def read(_: Callable[[DatasetId], Dataset], wanted: DatasetId) -> Future[Dataset]:
        found: Future[Dataset] = Future()
        found.set_result(dataset(int(wanted, 16)))
        sealed.append(found.result().catalog_fd)
        return found

    executor: Any = SimpleNamespace(submit=read)
    datasets = Datasets(str(tmp_path), anything, anything, anything, executor)
    for number in range(100):
        datasets.load(DatasetId(f"{number:032x}"))
    assert len(set(sealed)) <= 3, "each was closed, and its number given away again"
    datasets.close()


def test_what_was_forgotten_since_a_dataset_was_read_is_at_home_with_it(tmp_path: Path) -> None:
    anything: Any = None
    datasets = Datasets(str(tmp_path), anything, anything, anything, anything)
    datasets.claimed, datasets.used = lambda _: False, lambda _: False
    old, new = dataset(1), replace(dataset(1), id=DatasetId("f" * 32))  # of one extent
    datasets.admit(old)
    for number in range(UNUSED + 1):
        datasets.admit(dataset(2 + number))
    assert datasets.known(old.id) is None
    datasets.admit(new)
    assert datasets.home(new.extent_ids[0]) == (new, 0)
    datasets.close()


def test_large_datasets_that_nobody_uses_are_forgotten_before_many_are(tmp_path: Path) -> None:
    anything: Any = None
    datasets = Datasets(str(tmp_path), anything, anything, anything, anything)
    datasets.claimed, datasets.used = lambda _: False, lambda _: False
    large = [replace(dataset(number), sizes=(1,) * (UNUSED_EXTENTS // 2)) for number in range(1, 5)]
    for each in large:
        datasets.admit(each)
    assert datasets.all() == large[1:], "the latest, and as many extents before it"
    datasets.close()


def test_so_are_those_of_which_something_is_cached_where_they_are_too_many(tmp_path: Path) -> None:
    anything: Any = None
    datasets = Datasets(str(tmp_path), anything, anything, anything, anything)
    large = [replace(dataset(number), sizes=(1,) * (CACHED_EXTENTS // 4)) for number in range(1, 8)]
    datasets.claimed, datasets.used = lambda each: each is large[0], lambda _: True
    for each in large:
        datasets.admit(each)
    assert datasets.all() == [large[0], *large[2:]], (
        "what is claimed, the latest, and as many extents before it"
    )
    datasets.close()


def test_an_extent_is_at_home_where_somebody_claims_it(tmp_path: Path) -> None:
    anything: Any = None
    datasets = Datasets(str(tmp_path), anything, anything, anything, anything)
    opened, read = dataset(1), replace(dataset(1), id=DatasetId("f" * 32))
    datasets.claimed = lambda each: each is read
    datasets.admit(opened)
    datasets.admit(read)
    assert datasets.home(read.extent_ids[0]) == (read, 0)
    datasets.close()


def test_an_extent_is_at_home_in_a_dataset_that_is_indexed(tmp_path: Path) -> None:
    anything: Any = None
    datasets = Datasets(str(tmp_path), anything, anything, anything, anything)
    unindexed: Any = SimpleNamespace(samples=0)
    provisional, indexed = replace(dataset(1), catalog=unindexed), replace(dataset(1), id=DatasetId("f" * 32))
    extent = indexed.extent_ids[0]
    assert datasets.home(extent) is None
    datasets.admit(provisional)
    assert datasets.home(extent) == (provisional, 0)
    datasets.admit(indexed)
    assert datasets.home(extent) == (indexed, 0)
    datasets.close()
