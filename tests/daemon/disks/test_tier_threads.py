"""Closing tiers whose disks answer late or never, within the given time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from cachesvc.core.errors import TierFailed
from cachesvc.core.model import TierName
from cachesvc.daemon.disks.tier_threads import TierThreads
from cachesvc.daemon.loop.lanes import Lane
from testbed import WAIT_S

NAME = TierName("nvme0")
SOON_S = 0.1


class Bench:
    """The threads of a disk. Its calls, its end and the release of its lock wait for `answers` where a test says so."""

    def __init__(self, lost: bool = False) -> None:
        self.done = list[str]()
        self.answers = threading.Event()
        self.tier = SimpleNamespace(name=NAME, close=lambda: self.done.append("close"))
        self.disk = SimpleNamespace(name=NAME, tier=self.tier, unlock=lambda: self.done.append("unlock"))
        tiers: Any = {NAME: SimpleNamespace(lost=lost)}
        openings: Any = [SimpleNamespace(disk=self.disk, probes=lane("probe"))]
        no_ram: Any = None
        self.threads = TierThreads(tiers, no_ram, openings, lane)

    def late(self) -> None:
        self.answers.wait(WAIT_S)

    def call(self) -> None:
        """Have a call under way that waits, and another one behind it."""
        begun = threading.Event()

        def work() -> None:
            begun.set()
            self.late()
            self.done.append("call")

        for each in (work, lambda: self.done.append("the next call")):
            self.threads.calls[NAME].submit(each, lambda _: None, lambda _: None)
        assert begun.wait(WAIT_S)

    def closed(self, within_s: float) -> bool:
        """Tell whether all threads end in time. The close takes little longer than that."""
        began = time.monotonic()
        self.threads.close(within_s)
        assert time.monotonic() - began < WAIT_S / 2
        return not self.threads.hangs


def lane(name: str) -> Lane:
    return Lane(name, lambda call: None)


@pytest.fixture
def bench() -> Iterator[Bench]:
    """At the test's end the disk answers, so that no thread is left."""
    found = Bench()
    yield found
    found.answers.set()


def test_a_tier_is_closed_when_the_calls_under_way_are_over(bench: Bench) -> None:
    bench.call()
    threading.Timer(0.05, bench.answers.set).start()
    assert bench.closed(within_s=WAIT_S / 4)
    assert bench.done == ["call", "close"]


def test_a_tier_is_abandoned_and_not_closed_under_a_call_that_does_not_end(bench: Bench) -> None:
    bench.call()
    assert not bench.closed(SOON_S)
    assert bench.done == ["unlock"]


def test_a_close_that_hangs_is_left_to_a_daemon_thread(bench: Bench) -> None:
    bench.tier.close = bench.late
    assert not bench.closed(SOON_S)
    assert bench.done == ["unlock"]
    left = [thread.daemon for thread in threading.enumerate() if thread.name == "in-time"]
    assert left == [True], "a daemon thread does not delay the end of the process"


def test_a_close_that_fails_is_done(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> None:
        raise TierFailed("it is broken")

    bench.tier.close = fails
    assert bench.closed(SOON_S)
    assert "did not close cleanly" in caplog.text


@pytest.mark.parametrize("hangs", [False, True])
def test_the_locks_of_a_lost_disk_are_released_unless_that_hangs(hangs: bool) -> None:
    bench = Bench(lost=True)
    unlock: Callable[[], None] = bench.disk.unlock
    bench.disk.unlock = bench.late if hangs else unlock
    assert bench.closed(SOON_S) != hangs
    assert bench.done == ([] if hangs else ["unlock"])
    bench.answers.set()
