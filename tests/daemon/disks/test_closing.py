"""Closing tiers whose disks answer late or never, within the given time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cachesvc.core.errors import TierFailed
from cachesvc.core.model import TierName
from cachesvc.daemon.disks import closing
from cachesvc.daemon.disks.closing import abandon, all_ended, close_tier
from cachesvc.daemon.loop.lanes import Lane
from testbed import WAIT_S

SOON_S = WAIT_S


class Disk:
    """A tier and its directory, whose `close` and `unlock` are given."""

    name = TierName("nvme0")

    def __init__(self, end: Callable[[], object]) -> None:
        self.close = self.unlock = end


@pytest.fixture
def answers() -> Iterator[threading.Event]:
    """Set when the disk answers; at the test's end, so that no thread is left."""
    event = threading.Event()
    yield event
    event.set()


def lane(*calls: Callable[[], object]) -> Lane:
    made = Lane("tier-test", lambda call: None, time.monotonic)
    for each in calls:
        made.submit(each, lambda _: None, lambda _: None)
    return made


def hanging(answers: threading.Event) -> Lane:
    """A lane with a call under way."""
    begun = threading.Event()

    def call() -> None:
        begun.set()
        answers.wait(SOON_S)

    made = lane(call)
    begun.wait(SOON_S)
    return made


def closed(disk: Disk, *lanes: Lane, within_s: float) -> bool:
    tier: Any = disk
    return close_tier(tier, lanes, time.monotonic() + within_s)


def test_a_tier_is_closed_when_the_calls_under_way_are_over(answers: threading.Event) -> None:
    done, begun = list[str](), threading.Event()

    def call() -> None:
        begun.set()
        answers.wait(SOON_S)
        done.append("call")

    lanes = lane(), lane(call, lambda: done.append("the next call"))
    begun.wait(SOON_S)
    threading.Timer(0.05, answers.set).start()
    assert closed(Disk(lambda: done.append("close")), *lanes, within_s=SOON_S)
    assert done == ["call", "close"]


def test_a_tier_is_not_closed_under_a_call_that_does_not_end(answers: threading.Event) -> None:
    done = list[str]()
    began = time.monotonic()
    assert not closed(Disk(lambda: done.append("close")), hanging(answers), lane(), within_s=0.05)
    assert time.monotonic() - began < SOON_S / 2
    assert done == []


def test_a_close_that_hangs_is_abandoned_and_one_that_fails_is_done(
    answers: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    assert not closed(Disk(lambda: answers.wait(SOON_S)), within_s=0.05)
    left = [thread.daemon for thread in threading.enumerate() if thread.name == "in-time"]
    assert left == [True], "a daemon thread does not delay the end of the process"

    def fails() -> None:
        raise TierFailed("it is broken")

    assert closed(Disk(fails), within_s=SOON_S)
    assert "did not close cleanly" in caplog.text


def test_locks_of_an_abandoned_disk_are_released_unless_that_hangs(answers: threading.Event) -> None:
    done = list[str]()
    disk: Any = Disk(lambda: done.append("unlock"))
    hung: Any = Disk(lambda: answers.wait(SOON_S))
    began = time.monotonic()
    assert not abandon(hung)
    assert time.monotonic() - began < SOON_S / 2
    assert abandon(disk)
    assert done == ["unlock"]


def test_all_threads_end_except_one_that_hangs(
    answers: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(closing, "ENDS_S", 0.05)
    other, after = lane(), threading.Event()
    assert not all_ended([hanging(answers), other])
    other.submit(after.set, lambda _: None, lambda _: None)
    assert not after.wait(0.2)
