"""Late reads: which of them are sent again, and in which order."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from cachesvc.core.errors import SourceUnavailable
from cachesvc.core.model import ObjectVersion
from cachesvc.core.rates.backoff import LATENCY_SAMPLES
from cachesvc.sources.paces import SharedHedges, SharedPace, new_paces
from cachesvc.sources.resilient import Resilient
from cachesvc.sources.source import OnReceived, ignore_received
from cachesvc.sources.timed_reads import Hedger, LateRead
from testbed import WAIT_S
from tests.support.clock import Clock
from tests.support.reads import FakeSource
from tests.support.waiting import wait_until

SIZE = 1000
X = ObjectVersion("fake://x", SIZE, "v")


def test_of_late_reads_that_wait_for_the_budget_the_one_needed_soonest_is_first() -> None:
    turn, allowed = threading.Event(), list[float]()

    def allow(read: LateRead) -> bool:
        if turn.is_set():
            allowed.append(read.rank)
        return turn.is_set()

    hedger = Hedger(allow, lambda read: None, time.monotonic)
    ended = LateRead(X, 0, SIZE, rank=0.0, running=False)
    for read in (*(LateRead(X, 0, SIZE, rank=rank) for rank in (3.0, 1.0, 2.0)), ended):
        hedger.watch(0.0, read)
    turn.set()
    wait_until(lambda: len(allowed) == 3)
    hedger.close()
    assert allowed == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("answered", [False, True])
def test_a_read_that_was_answered_has_more_time(answered: bool) -> None:
    clock, sent = Clock(), list[int]()
    hedger = Hedger(lambda read: True, lambda read: sent.append(read.offset), clock)
    clock.now = 1.0
    hedger.watch(0.5, LateRead(X, 0, SIZE, late_at=5.0, answered=answered))
    hedger.watch(0.4, LateRead(X, 1, SIZE))
    wait_until(lambda: len(sent) == (1 if answered else 2))
    assert 1 in sent
    clock.now = 5.0
    hedger.watch(0.0, LateRead(X, 2, SIZE))
    wait_until(lambda: len(sent) == 3)
    hedger.close()


class Stalling(FakeSource):
    """A source whose reads take 10 ms of a clock. `begin` is called with the first slow one, which lasts until it is
    interrupted or let go."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.begin: Callable[[], None] | None = None
        self.begun, self.ends = threading.Event(), threading.Event()
        self.interrupted = False

    def read_into(
        self, version: ObjectVersion, offset: int, into: memoryview, received: OnReceived = ignore_received
    ) -> None:
        begin, self.begin = self.begin, None
        if begin is not None:
            begin()
            self.begun.set()
            assert self.ends.wait(WAIT_S)
            if self.interrupted:
                raise SourceUnavailable("interrupted")
        self._clock.now += 0.01
        into[:] = b"x" * len(into)

    def interrupt(self, thread: int) -> None:
        self.interrupted = True
        self.ends.set()


@pytest.mark.parametrize("why_not", ["", "off", "throttled", "spent"])
def test_a_late_read_is_sent_again_unless_that_is_off_or_the_source_throttles_or_the_budget_is_spent(
    why_not: str,
) -> None:
    clock, pace = Clock(), SharedPace()
    source, hedges = Stalling(clock), SharedHedges(0.0 if why_not == "off" else 0.02)
    resilient = Resilient(source, clock=clock, pace=pace, hedges=hedges)
    for _ in range(LATENCY_SAMPLES):
        resilient.read_into(X, 0, memoryview(bytearray(SIZE)))

    def begin() -> None:
        if why_not == "spent":
            hedges.spend(SIZE)
        if why_not == "throttled":
            with pace.held() as held:
                held.most = 1e9

    source.begin, into = begin, bytearray(SIZE)
    reading = threading.Thread(target=resilient.read_into, args=(X, 0, memoryview(into)))
    reading.start()
    assert source.begun.wait(WAIT_S)
    clock.now += 1.0
    if why_not:
        reading.join(0.1)
        source.ends.set()
    reading.join(WAIT_S)
    resilient.close()
    assert bytes(into) == b"x" * SIZE
    assert source.interrupted == (resilient.counters.hedges == 1) == (not why_not)


@pytest.fixture
def file() -> Iterator[int]:
    with new_paces() as file:
        yield file.fileno()


def test_processes_have_one_budget(file: int) -> None:
    one, other = SharedHedges(0.5, file), SharedHedges(0.5, file)
    one.earn(4 << 20)
    assert other.fits(2 << 20)
    assert other.take(0.0, 1 << 20, 0.0)
    assert not one.fits(2 << 20)
    assert one.take(math.inf, 1 << 20, 0.0)
    assert not other.fits(1)
