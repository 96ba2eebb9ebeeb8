"""Checks of copies: few at a time in each tier, with users in turn."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from functools import partial
from typing import Any

from cachesvc.core.errors import CorruptData, OutOfSpace, SourceUnavailable
from cachesvc.core.events import Corrupt, Event, Recovered
from cachesvc.core.limits import VERIFY_TRIES
from cachesvc.core.model import ExtentId, TierName
from cachesvc.core.node.node import Node
from cachesvc.core.tiering.policy import TierSpec
from cachesvc.daemon.fills.checks import CHECKS_AT_ONCE, CheckResult, Checks
from cachesvc.daemon.processes import jobs
from cachesvc.tiers.tier import Checksums, translated

SLOW, QUICK = TierName("slow"), TierName("quick")
COPIES = 64
HOARDER, VISITOR = 1, 2
GOOD = jobs.JobDone()


def extent(number: int) -> ExtentId:
    return ExtentId(number.to_bytes(16, "big"))


class Bench:
    """Checks over two disks, with fillers that answer a job when the test calls `end`."""

    def __init__(self) -> None:
        self.jobs: list[Callable[[jobs.Answer], None]] = []
        self.over: list[tuple[int, CheckResult]] = []
        self.short = self.late = False
        self.node = Node([TierSpec(SLOW, 1 << 20), TierSpec(QUICK, 1 << 20)])
        for tier, first in ((SLOW, 0), (QUICK, COPIES)):
            self.node.handle(Recovered(tier, {extent(first + each): 1 for each in range(COPIES)}), 0.0)
        disks: Any = dict.fromkeys((SLOW, QUICK), self)
        self.corrupt: list[ExtentId] = []
        self.checks = Checks(self.node, disks, {}, self, self.handle, lambda _: None)  # type: ignore[arg-type]

    def open(self, _: ExtentId) -> tuple[int, Checksums | None]:
        if self.short:
            with translated("slow", "open an extent"):
                raise OSError(errno.EMFILE, "too many open files")
        return os.open(os.devnull, os.O_RDONLY), None if self.late else Checksums(1, bytes(8))

    def submit(
        self, _make: object, _fds: object, answered: Callable[[jobs.Answer], None], _tiers: object
    ) -> None:
        self.jobs.append(answered)

    def verify(self, number: int, user: int) -> None:
        tier = SLOW if number < COPIES else QUICK
        self.checks.verify(extent(number), tier, partial(self._over, number), user)

    def end(self, answer: jobs.Answer = GOOD) -> None:
        self.jobs.pop(0)(answer)

    def handle(self, event: Event) -> None:
        assert isinstance(event, Corrupt)
        self.corrupt.append(event.extent)

    def _over(self, number: int, good: CheckResult) -> None:
        self.over.append((number, good))


def test_a_copy_that_cannot_be_opened_for_lack_of_descriptors_is_neither_good_nor_corrupt() -> None:
    bench = Bench()
    bench.short = True
    bench.verify(0, HOARDER)
    bench.short = False
    bench.verify(0, HOARDER)
    bench.end()
    assert bench.over == [(0, None), (0, True)]


def test_a_copy_that_no_process_could_check_is_neither_good_nor_corrupt() -> None:
    """A hung mount, no process, or too little memory prove nothing against a copy."""
    bench = Bench()
    bench.verify(0, HOARDER)
    for _ in range(VERIFY_TRIES):
        bench.end(jobs.JobDone(SourceUnavailable.code, "a mount hangs", retry=True))
    bench.verify(0, HOARDER)
    for _ in range(VERIFY_TRIES):
        bench.end(jobs.JobDone(OutOfSpace.code, "a filler is at its limit", retry=True))
    assert bench.over == [(0, None), (0, None)]
    assert not bench.corrupt
    bench.verify(0, HOARDER)
    for _ in range(VERIFY_TRIES):
        bench.end(jobs.JobDone(SourceUnavailable.code, "it ended the process", retry=True, lost=True))
    assert bench.over == [(0, None), (0, None), (0, False)]
    assert bench.corrupt == [extent(0)]


def test_a_copy_with_a_pending_commit_is_checked_too() -> None:
    bench = Bench()
    bench.late = True
    bench.checks.committing[extent(0), SLOW] = Checksums(1, bytes(8))
    bench.verify(0, HOARDER)
    assert not bench.over
    bench.end(jobs.JobDone(CorruptData.code, "it does not match"))
    assert (bench.over, bench.corrupt) == ([(0, False)], [extent(0)])


def test_a_commit_that_ends_while_its_copy_is_opened_is_checked_as_committed() -> None:
    bench = Bench()
    opened = bench.open

    def last(wanted: ExtentId) -> tuple[int, Checksums | None]:
        bench.open, bench.late = opened, False  # type: ignore[method-assign]
        return opened(wanted)[0], None

    bench.open = last  # type: ignore[method-assign, assignment]
    bench.verify(0, HOARDER)
    assert not bench.over
    bench.end()
    assert bench.over == [(0, True)]


def test_a_user_with_many_checks_delays_another_user_by_one() -> None:
    bench = Bench()
    for number in range(COPIES - 1):
        bench.verify(number, HOARDER)
    assert len(bench.jobs) == CHECKS_AT_ONCE
    bench.verify(COPIES - 1, VISITOR)
    bench.verify(COPIES - 2, VISITOR)  # both users wait for this check, which runs in the visitor's turn
    while len(bench.over) < CHECKS_AT_ONCE + 4:
        bench.end()
    assert {COPIES - 1, COPIES - 2} <= {number for number, _ in bench.over}
    while bench.jobs:
        bench.end()
    assert sorted(bench.over) == sorted([*((number, True) for number in range(COPIES)), (COPIES - 2, True)])


def test_a_disk_that_hangs_delays_no_other_disk_and_its_replacement_starts_anew() -> None:
    bench = Bench()
    for number in range(COPIES):
        bench.verify(number, HOARDER)
    hung, bench.jobs = bench.jobs, []
    bench.verify(COPIES, VISITOR)
    bench.end()
    assert bench.over == [(COPIES, True)]
    bench.checks.renewed(SLOW)
    assert len(bench.over) == 1 + COPIES
    bench.verify(0, VISITOR)
    assert len(bench.jobs) == 1
    for answered in hung:
        answered(jobs.JobDone())
    assert len(bench.jobs) == 1
    bench.end()
    assert len(bench.over) == 2 + COPIES
