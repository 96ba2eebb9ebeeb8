"""Commits to disks that sync slowly: fills do not wait for them until too many are pending."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cachesvc.core.errors import CacheError, TierFailed
from cachesvc.core.model import ExtentId, TierName
from cachesvc.daemon.fills.fill_parts import MAX_UNCOMMITTED, Commits
from tests.support.faults.disks import EXTENTS, on_faulty_disk, sample

DISK = TierName("nvme0")
SYNC_S = 2.0


class Steps:
    """A lane that runs one call for each `step`."""

    def __init__(self) -> None:
        self.calls: list[tuple[Callable[[], Any], Callable[[Any], None], Callable[[CacheError], None]]] = []

    def submit(self, *call: Any) -> None:
        self.calls.append(call)

    def step(self) -> None:
        work, then, otherwise = self.calls.pop(0)
        try:
            then(work())
        except CacheError as error:
            otherwise(error)


def extent(number: int) -> ExtentId:
    return ExtentId(number.to_bytes(16, "big"))


class Bench:
    def __init__(self) -> None:
        self.committer = Steps()
        lanes: Any = {DISK: self.committer}
        self.commits = Commits(lanes, lanes)
        self.said: list[str] = []

    def commit(self, number: int, work: Callable[[], None] = lambda: None) -> None:
        said = self.said.append
        self.commits.submit(
            extent(number), DISK, work, lambda _: said(f"{number}"), lambda error: said(str(error))
        )


@pytest.mark.parametrize("fails", [False, True])
def test_fills_wait_while_too_many_commits_are_pending(fails: bool) -> None:
    def work() -> None:
        if fails:
            raise TierFailed("it broke")

    bench = Bench()
    for number in range(MAX_UNCOMMITTED):
        bench.commits.when_below_limit(DISK, lambda: bench.said.append("begun"))
        bench.commit(number, work)
    assert bench.said == ["begun"] * MAX_UNCOMMITTED
    bench.said.clear()
    bench.commit(MAX_UNCOMMITTED, work)  # the commit of a fill that was already running
    for _ in range(2):
        bench.commits.when_below_limit(DISK, lambda: bench.said.append("begun"))
    assert bench.said == []
    bench.committer.step()
    assert bench.said == ["it broke" if fails else "0"], "the limit of pending commits is still reached"
    bench.committer.step()
    assert bench.said[1:] == ["it broke" if fails else "1", "begun", "begun"]


def test_fills_do_not_wait_for_syncs(tmp_path: Path) -> None:
    data = sample(tmp_path)
    with on_faulty_disk(tmp_path, data) as (disk, found):
        disk.behave(f"fsync {SYNC_S}")
        began = time.monotonic()
        assert found.read() == EXTENTS
        assert time.monotonic() - began < EXTENTS / 4 * SYNC_S
