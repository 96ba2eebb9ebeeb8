"""A cap on what one user may hold of the daemon: reader connections, control calls, rows of plans."""

from __future__ import annotations

import math
import os
import threading
from collections import Counter


class UserCap:
    """Counts by uid. The daemon's own user is exempt from `per_user`, but not from `total`. Safe from any thread."""

    def __init__(self, per_user: int, total: float = math.inf) -> None:
        self._per_user, self._total = per_user, total
        self._own = os.geteuid()
        self._held: Counter[int] = Counter()
        self._lock = threading.Lock()

    @property
    def count(self) -> int:
        """Return what all users hold together."""
        return self._held.total()

    def take(self, uid: int, count: int = 1) -> bool:
        """Count `count` more for a user. Return False, and count nothing, where that exceeds a limit."""
        with self._lock:
            within = uid == self._own or self._held[uid] + count <= self._per_user
            admitted = within and self._held.total() + count <= self._total
            if admitted:
                self._held[uid] += count
            return admitted

    def give_back(self, uid: int, count: int = 1) -> None:
        """Count `count` less."""
        with self._lock:
            self._held[uid] -= count
            if not self._held[uid]:
                del self._held[uid]
