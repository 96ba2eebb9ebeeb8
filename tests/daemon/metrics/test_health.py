"""Probes: alive while the event loop answers, ready once this node can serve its own readers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from cachesvc.daemon.loop.loop import Loop
from cachesvc.daemon.metrics.scrape_server import Health


@contextmanager
def running() -> Iterator[Loop]:
    loop = Loop()
    thread = threading.Thread(target=loop.run, args=(lambda: float("inf"), lambda: None, time.monotonic))
    thread.start()
    try:
        yield loop
    finally:
        loop.stop()
        thread.join()


def test_a_loop_that_hangs_is_not_alive_and_not_ready() -> None:
    with running() as loop:
        health = Health(loop, bool)
        assert (health.alive(), health.ready()) == ("", "")
    hangs = Health(Loop(), bool, answer_s=0.0)
    assert hangs.alive() == hangs.ready() == "the event loop has not answered for 0 s"


def test_a_node_waits_for_its_first_list_of_members() -> None:
    waits = True
    with running() as loop:
        health = Health(loop, lambda: waits)
        assert health.ready() == "waiting for the first list of members"
        assert health.alive() == "", "a missing list is no reason for a restart"
        waits = False
        assert health.ready() == ""


def test_a_daemon_that_ends_takes_no_new_readers() -> None:
    with running() as loop:
        health = Health(loop, bool)
        health.leave()
        assert (health.ready(), health.alive()) == ("this daemon is stopping", "")
    assert Health(loop, bool).ready() == "this daemon is stopping"
