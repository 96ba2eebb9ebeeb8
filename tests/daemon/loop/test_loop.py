"""The event loop, called from other threads."""

from __future__ import annotations

import gc
import math
import os
import threading
import time
import weakref

import pytest

from cachesvc.core.errors import DaemonUnavailable, NotFound
from cachesvc.daemon.loop.loop import Loop


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
