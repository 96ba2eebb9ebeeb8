"""Preparers at the daemon's edge: digests, stalls, and processes that end. The clock is the test's."""

from __future__ import annotations

import pytest

from cachesvc.core import events
from cachesvc.core.errors import CorruptData, DeadlineExceeded, OutOfSpace, SourceUnavailable
from cachesvc.core.limits import PREPARE_STALL_S
from cachesvc.core.model import DatasetId, ReaderId
from cachesvc.daemon.fills.preparers import Preparers
from cachesvc.daemon.processes.jobs import JobDone

DATASET, ONE, TWO = DatasetId("d"), ReaderId(1), ReaderId(2)
BLOCK = 64 << 10


class Bench:
    def __init__(self) -> None:
        self.now = 0.0
        self.events: list[events.Event] = []
        self.offers: list[tuple[int, ...]] = []
        self.done: list[JobDone] = []
        self.preparers = Preparers(self.events.append, lambda: self.now)
        self.preparers.offer = lambda *offer: self.offers.append(offer)
        self.preparers.joined(ONE, DATASET)

    def make(self, preparer: ReaderId = ONE, size_bytes: int = 2 * BLOCK + 1, uneven: bool = False) -> int:
        self.preparers.make(preparer, 7, size_bytes, 99, uneven, self.done.append)
        return self.offers[-1][1]

    def passes(self, seconds: float) -> None:
        self.now += seconds
        if self.preparers.next_deadline() <= self.now:
            self.preparers.tick()


def test_digests_come_in_parts_and_end_the_fill_together() -> None:
    bench = Bench()
    number = bench.make()
    assert bench.offers == [(ONE, number, 7, 2 * BLOCK + 1, 99)]
    bench.preparers.progress(ONE, number, 1, (b"b" * 8 + b"c" * 8).hex())
    bench.preparers.progress(ONE, number, 0, (b"a" * 8).hex())
    bench.preparers.made(ONE, number, 0, 0, "")
    assert bench.done == [JobDone(digests=b"a" * 8 + b"b" * 8 + b"c" * 8, size_bytes=2 * BLOCK + 1)]


@pytest.mark.parametrize("takes", [1, BLOCK, BLOCK + 1, 0, 2 * BLOCK + 2])
def test_an_uneven_extent_takes_no_more_than_was_reserved_and_has_the_digests_of_that(takes: int) -> None:
    bench = Bench()
    number, blocks = bench.make(uneven=True), -(-takes // BLOCK)
    bench.preparers.progress(ONE, number, 0, (b"a" * 8 * min(blocks, 3)).hex())
    bench.preparers.made(ONE, number, takes, 0, "")
    good = JobDone(digests=b"a" * 8 * blocks, size_bytes=takes)
    assert bench.done == [good] if 0 < takes <= 2 * BLOCK + 1 else bench.done[0].code == CorruptData.code


def test_an_extent_without_all_its_digests_is_not_made() -> None:
    bench = Bench()
    number = bench.make()
    bench.preparers.made(ONE, number, 0, 0, "")
    assert [done.code for done in bench.done] == [CorruptData.code]


@pytest.mark.parametrize(("first", "digests"), [(0, b"x"), (3, b"x" * 8), (1 << 60, b"x" * 8)])
def test_digests_of_other_blocks_break_the_protocol(first: int, digests: bytes) -> None:
    bench = Bench()
    with pytest.raises(ValueError, match="blocks"):
        bench.preparers.progress(ONE, bench.make(), first, digests.hex())


def test_a_preparer_without_progress_loses_its_extent_and_works_again_once_it_has_ended_it() -> None:
    bench = Bench()
    number = bench.make()
    bench.passes(PREPARE_STALL_S - 1)
    bench.preparers.progress(ONE, number, 0, "")
    bench.passes(PREPARE_STALL_S - 1)
    assert bench.done == []
    bench.passes(2)
    assert [(done.code, done.retry) for done in bench.done] == [(DeadlineExceeded.code, True)]
    assert bench.events[1:] == [events.PreparerStalled(ONE)]
    bench.preparers.progress(ONE, number, 0, (b"a" * 24).hex())  # the late writer: its target was dropped
    bench.preparers.made(ONE, number, 0, 0, "")
    assert len(bench.done) == 1
    assert bench.events[2:] == [events.PreparerJoined(ONE, DATASET)]


def test_a_preparer_that_fails_says_why() -> None:
    bench = Bench()
    bench.preparers.made(ONE, bench.make(), 0, OutOfSpace.code, "no memory")
    assert bench.done == [JobDone(OutOfSpace.code, "no memory", retry=True)]


def test_a_preparer_that_ends_fails_its_extent_and_no_other() -> None:
    bench = Bench()
    bench.preparers.joined(TWO, DATASET)
    bench.make(ONE)
    number = bench.make(TWO, 1)
    bench.preparers.left(ONE)
    assert [(done.code, done.retry) for done in bench.done] == [(SourceUnavailable.code, True)]
    bench.preparers.progress(ONE, number, 0, (b"a" * 8).hex())
    bench.preparers.made(ONE, number, 0, 0, "")  # of another's work
    assert len(bench.done) == 1
    bench.preparers.left(ReaderId(3))  # a reader that never prepared
