"""The departure of a daemon that another one replaces."""

from __future__ import annotations

import logging
import threading
import time

from cachesvc.daemon.runner import Runner

log = logging.getLogger(__name__)
DRAIN_S = 10.0
"""The longest wait for fills under way. Those that take longer are begun again by the next daemon."""
POLL_S = 0.02


def depart(runner: Runner) -> None:
    """Begin no more fills, and end the loop when those under way have ended. Readers are served meanwhile from what is
    resident. Runs on the loop's thread."""
    log.info("another daemon replaces this one")
    runner.fills.pause()
    threading.Thread(target=_drain, args=(runner,), name="departure", daemon=True).start()


def _drain(runner: Runner) -> None:
    deadline = time.monotonic() + DRAIN_S
    while runner.loop.call(lambda: runner.fills.under_way or runner.plans.under_way):
        if time.monotonic() >= deadline:
            break
        time.sleep(POLL_S)
    runner.loop.stop()
