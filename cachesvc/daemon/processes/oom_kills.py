"""Detection of child processes that the kernel's OOM killer ended."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

from cachesvc.system.memory import oom_kills

TOGETHER_S = 1.0
"""Deaths within this time of a counted kill are put down to it, since the kernel may kill several processes at once."""


class OomKills:
    """Compares the kernel's count of kills with the previous count; the kernel counts a kill before its process is dead."""

    def __init__(
        self, count: Callable[[], int] = oom_kills, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._count, self._clock = count, clock
        self._known = count()
        self._until = clock()

    def ended(self, code: int | None) -> bool:
        """Tell whether a process that just ended with this exit code was killed for memory.

        `code` is None where the process has not died yet, such as while the kernel frees its memory.
        """
        if code not in (None, -signal.SIGKILL):
            return False
        count = self._count()
        if count > self._known:
            self._known, self._until = count, self._clock() + TOGETHER_S
        return self._clock() < self._until
