"""Waiting for a condition."""

from __future__ import annotations

import time

from testbed import WAIT_S


def wait_until(good: object, limit_s: float = WAIT_S) -> None:
    """Poll the function `good` until it returns a true value; fail after `limit_s`."""
    deadline = time.monotonic() + limit_s
    while not good():  # type: ignore[operator]
        assert time.monotonic() < deadline, "the condition did not become true"
        time.sleep(0.01)
