"""Finds the quotas of a claim, by the prefix of its data and by the user who reads it, and caps what one user may hold of
the daemon."""

from __future__ import annotations

import math
import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence

from cachesvc.config import USER, QuotaSpec
from cachesvc.core.errors import InvalidInput
from cachesvc.daemon.access.tenants import ANONYMOUS
from cachesvc.sources.files import under
from cachesvc.sources.uri import canonical


class Quotas:
    """The quotas that `--quota` set."""

    def __init__(self, specs: Sequence[QuotaSpec], resolve: Callable[[str], str] = canonical) -> None:
        """`resolve` returns the location of a prefix as catalogs name it. Raises as `replace`."""
        self.resolve = resolve
        self.replace(specs)

    def replace(self, specs: Sequence[QuotaSpec]) -> None:
        """Take other quotas, for claims from now on. Raises InvalidInput, and changes nothing, for an invalid prefix, and
        for two quotas of one name."""
        users: dict[str, int] = {}
        prefixes: dict[str, int] = {}
        for spec in specs:
            of_user = spec.of.partition(":")[0] == USER
            given = users if of_user else prefixes
            name = spec.of if of_user else self.resolve(spec.of).rstrip("/")
            if name in given:
                raise InvalidInput(f"--quota names {spec.of} more than once; give it one size")
            given[name] = spec.size_bytes
        self._users, self._prefixes = users, prefixes

    def of_dataset(self, uri_prefix: str) -> int | None:
        """Return the bytes that a dataset may keep: the longest matching prefix decides. None: no quota."""
        below = [prefix for prefix in self._prefixes if under(uri_prefix, (prefix,))]
        return self._prefixes[max(below, key=len)] if below else None

    def of_user(self, uid: int) -> int | None:
        """Return the bytes that the datasets of one user may keep together; None: no quota, or no user. Callers without a
        token may be any user: all of them together get the smallest quota of a user."""
        if uid == ANONYMOUS:
            return min(self._users.values(), default=None)
        if uid < 0:
            return None
        return self._users.get(f"{USER}:{uid}", self._users.get(USER))


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
