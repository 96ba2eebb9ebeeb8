"""Processes that share the pace of a source: each knows what the others learned, and one that dies blocks no other."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Iterator
from io import FileIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachesvc.core.errors import SourceUnavailable
from cachesvc.core.model import ObjectVersion
from cachesvc.core.rates.backoff import Pace
from cachesvc.sources.paces import PLACES, Paces, new_paces
from cachesvc.sources.resilient import Resilient
from testbed import WAIT_S
from tests.support.clock import Clock
from tests.support.reads import FakeSource

JOINS = 3_000
WORKER = """
import sys
from cachesvc.sources.paces import Paces
pace = Paces(int(sys.argv[1]))("s3://b")
print("begun", flush=True)
for _ in range(int(sys.argv[2])):
    with pace.held() as held:
        held.join(1.0)
"""


@pytest.fixture
def file() -> Iterator[FileIO]:
    with new_paces() as file:
        yield file


def worker(file: FileIO, joins: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", WORKER, str(file.fileno()), str(joins)]
    return subprocess.Popen(command, pass_fds=(file.fileno(),), stdout=subprocess.PIPE)


def next_place(file: FileIO) -> float:
    with Paces(file.fileno())("s3://b").held() as pace:
        return pace.join(1.0)


def test_processes_share_one_queue(file: FileIO) -> None:
    workers = [worker(file, JOINS) for _ in range(3)]
    for each in workers:
        with each:
            assert each.wait(WAIT_S) == 0
    assert next_place(file) == 3 * JOINS + 1


def test_a_process_killed_while_it_holds_the_pace_blocks_no_other(file: FileIO) -> None:
    chance = random.Random(3)
    for _ in range(8):
        with worker(file, 10**9) as doomed:
            assert doomed.stdout is not None
            assert doomed.stdout.readline()
            time.sleep(chance.random() / 50)
            doomed.kill()
    place = next_place(file)
    assert place > 8
    assert next_place(file) == place + 1


def test_each_source_has_its_own_pace_and_those_beyond_the_file_are_not_shared(file: FileIO) -> None:
    paces, others = Paces(file.fileno()), Paces(file.fileno())
    for number in range(PLACES + 2):
        with paces(f"s3://{number}").held() as pace:
            for _ in range(number):
                pace.join(1.0)
    for number in range(PLACES + 2):
        with others(f"s3://{number}").held() as pace:
            assert pace.join(1.0) == (number + 1 if number < PLACES else 1)


events = st.tuples(
    st.sampled_from(["join", "accepted", "refused"]), st.floats(0, 3), st.sampled_from([0, 1, 30])
)


@given(st.lists(events, max_size=100))
def test_a_paces_numbers_are_its_whole_state(found: list[tuple[str, float, float]]) -> None:
    one, other, now = Pace(), Pace(), 0.0
    for what, later, retry_after_s in found:
        now += later
        for pace in (one, other):
            if what == "join":
                pace.join(now)
            elif what == "accepted":
                pace.accepted(now, now)
            else:
                pace.refused(now, now, retry_after_s)
        other = Pace(*other.numbers())
        assert other == one


class Closed(FakeSource):
    """A source that throttles with a Retry-After and serves requests after it."""

    def __init__(self, clock: Clock, until: float) -> None:
        self.clock, self.until, self.asked = clock, until, list[float]()

    def head(self, uri: str) -> ObjectVersion:
        self.asked.append(self.clock.now)
        if self.clock.now < self.until:
            error = SourceUnavailable("SlowDown")
            error.throttled, error.retry_after_s = True, self.until - self.clock.now
            raise error
        return ObjectVersion(uri, 1, "v")


def test_a_retry_after_told_to_one_process_delays_the_others(file: FileIO) -> None:
    clocks = Clock(), Clock()
    sources = [Closed(clock, 30.0) for clock in clocks]
    for source, clock in zip(sources, clocks, strict=True):
        pace = Paces(file.fileno())("s3://b")
        Resilient(source, None, clock, lambda: 0.5, clock.sleep, pace).head("s3://b/x")
    assert sources[0].asked[0] == 0.0
    assert [30 <= at < 31 for at in sources[1].asked] == [True], "it had not asked before"


def test_rates_of_the_settings_hold_for_all_processes_together(file: FileIO) -> None:
    clock = Clock()

    class Answering(FakeSource):
        def head(self, uri: str) -> ObjectVersion:
            return ObjectVersion(uri, 1, "v")

        def read_into(self, *_: object) -> None:
            return None

    paces = [Paces(file.fileno()) for _ in range(2)]
    readers = [
        Resilient(
            Answering(),
            None,
            clock,
            lambda: 0.5,
            clock.sleep,
            each("s3://b", most=10),
            each("bytes of s3://b", most=1000),
        )
        for each in paces
    ]
    for number in range(20):
        readers[number % 2].head("s3://b/x")
    assert 1.8 <= clock.now < 2.0, "twenty requests at ten a second, the first at once"
    clock.now = 100.0
    for number in range(4):
        readers[number % 2].read_into(ObjectVersion("s3://b/x", 500, "v"), 0, memoryview(bytearray(500)))
    assert 101.4 <= clock.now < 101.7, "the fourth read waits for the bytes of three"
    Paces(file.fileno())("s3://b")
    readers[0].head("s3://b/x")
    assert clock.now < 101.7, "settings without a rate end the limit"
