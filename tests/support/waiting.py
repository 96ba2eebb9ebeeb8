"""Wait for a condition, or fail."""

from __future__ import annotations

import time

from testbed import WAIT_S


def wait_until(good: object, limit_s: float = WAIT_S) -> None:
    deadline = time.monotonic() + limit_s
    while not good():  # type: ignore[operator]
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.01)
