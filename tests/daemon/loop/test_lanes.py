"""Lanes answer every call, whatever it raises; tiers are probed and stall; and other threads call the event loop."""

from __future__ import annotations

import gc
import math
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest

from cachesvc.core.errors import CacheError, DaemonUnavailable, NotFound, OutOfSpace, TierFailed
from cachesvc.core.model import TierName
from cachesvc.daemon.disks.watch import DiskWatch
from cachesvc.daemon.loop.lanes import Lane
from cachesvc.daemon.loop.loop import Loop
from cachesvc.tiers.probe import Room
from testbed import WAIT_S


@pytest.fixture
def posted() -> queue.Queue[Callable[[], None]]:
    return queue.Queue()


@pytest.fixture
def lane(posted: queue.Queue[Callable[[], None]]) -> Iterator[Lane]:
    made = Lane("tier-test", posted.put, time.monotonic)
    yield made
    assert made.close(WAIT_S)


@pytest.mark.parametrize(
    ("raised", "answered"),
    [
        (OutOfSpace("full"), OutOfSpace),
        (OSError(5, "Input/output error"), TierFailed),
        (AssertionError("reserved twice"), TierFailed),
        (KeyError("extent"), TierFailed),
        (MemoryError(), TierFailed),
    ],
)
def test_any_error_of_a_call_is_answered_and_the_next_call_runs(
    lane: Lane,
    posted: queue.Queue[Callable[[], None]],
    caplog: pytest.LogCaptureFixture,
    raised: Exception,
    answered: type[CacheError],
) -> None:
    def work() -> None:
        raise raised

    results: list[object] = []
    errors: list[CacheError] = []
    lane.submit(work, results.append, errors.append)
    lane.submit(lambda: "next", results.append, errors.append)
    for _ in range(2):
        posted.get(timeout=WAIT_S)()
    assert results == ["next"]
    assert [type(error) for error in errors] == [answered]
    ours = not isinstance(raised, CacheError | OSError)
    assert ("unexpectedly" in caplog.text and "Traceback" in caplog.text) == ours


class BrokenProbe:
    """A tier whose probe raises an unexpected error."""

    name = TierName("nvme0")

    def probe(self, thorough: bool, sync: bool = True) -> Room:
        raise KeyError("probe")

    revive = None  # not called


class SilentProbe:
    """A tier that answers no probe until the test says so."""

    name = TierName("nvme0")

    def __init__(self) -> None:
        self.answer = threading.Event()

    def probe(self, thorough: bool, sync: bool = True) -> Room:
        self.answer.wait(WAIT_S)
        return Room(0, 0)

    revive = None  # not called


@pytest.mark.parametrize("busy_s", [0.0, 4.0])
def test_a_tier_that_answers_neither_probe_nor_call_stalls(
    posted: queue.Queue[Callable[[], None]], busy_s: float
) -> None:
    now, heard = [0.0], []
    watch = DiskWatch(
        lambda *_: None, lambda *_: None, lambda *_: None, lambda *said: heard.append(said), lambda: now[0]
    )
    tier = SilentProbe()
    jobs_s = lambda: 0.0 if heard else busy_s  # noqa: E731 - its jobs end when the stall is reported
    probes = Lane("probe", posted.put, lambda: now[0])
    watch.add(tier, probes, (), jobs_s)  # type: ignore[arg-type]
    for _ in range(5):
        watch.tick()
        now[0] = watch.next_deadline()
    assert heard == ([("nvme0", True)] if busy_s else []), "said once"
    tier.answer.set()
    posted.get(timeout=WAIT_S)()
    probes.close(WAIT_S)
    assert heard == ([("nvme0", True), ("nvme0", False)] if busy_s else [])


def test_an_unexpected_error_of_a_probe_counts_as_a_failed_probe(
    posted: queue.Queue[Callable[[], None]],
) -> None:
    now = [0.0]
    lost: list[str] = []
    watch = DiskWatch(
        lambda name, why: lost.append(why),
        lambda name: None,
        lambda *_: None,
        lambda *_: None,
        lambda: now[0],
    )
    probes = Lane("probe", posted.put, lambda: now[0])
    watch.add(BrokenProbe(), probes, (), lambda: 0.0)  # type: ignore[arg-type]
    for _ in range(2):
        now[0] = max(now[0], watch.next_deadline())
        watch.tick()
        posted.get(timeout=WAIT_S)()
    probes.close(WAIT_S)
    assert len(lost) == 1
    assert "unexpectedly" in lost[0]


class Request:
    """An object that a call refers to."""


def fail() -> None:
    raise NotFound("not here")


def test_work_that_posts_more_work_does_not_delay_descriptors() -> None:
    loop, (ours, theirs) = Loop(), os.pipe()
    os.write(theirs, b"x")
    rounds = 0

    def more() -> None:
        nonlocal rounds
        rounds += 1
        assert rounds < 100, "the descriptor was never looked at"
        loop.post(more)

    loop.post(more)
    loop.watch(ours, loop.stop)
    loop.run(lambda: math.inf, lambda: None, time.monotonic)
    assert rounds <= 2
    loop.unwatch(ours)
    loop.close()
    os.close(ours)
    os.close(theirs)


def test_an_error_releases_its_callers_objects_at_once() -> None:
    loop = Loop()
    thread = threading.Thread(target=loop.run, args=(lambda: math.inf, lambda: None, time.monotonic))

    def ask() -> weakref.ref[Request]:
        request = Request()
        with pytest.raises(NotFound):
            loop.call(fail)
        return weakref.ref(request)

    thread.start()
    gc.disable()
    try:
        assert loop.call(lambda: 17) == 17
        assert ask()() is None
    finally:
        gc.enable()
        loop.stop()
        thread.join()
    with pytest.raises(DaemonUnavailable):
        loop.call(fail)
    loop.close()
