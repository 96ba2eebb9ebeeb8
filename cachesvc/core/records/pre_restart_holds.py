"""Memory that readers map from before the daemon's restart. Each extent counts once for each user, and once in all."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from cachesvc.core.model import ExtentId

ALL_USERS = None
"""The account in which an extent counts once for all users together: they map the same memory."""


class Hold(NamedTuple):
    """One reader's hold of one extent. `size_bytes` 0: it counts nothing, and only its release is expected."""

    size_bytes: int
    user: int


class PreRestartHolds:
    """Held bytes of each user, and of `ALL_USERS`."""

    def __init__(self) -> None:
        self.held_bytes: Counter[int | None] = Counter()
        self.sizes: dict[ExtentId, int] = {}
        """Sizes in bytes of the extents that some reader holds."""
        self._readers: Counter[tuple[int | None, ExtentId]] = Counter()

    def fits(self, extent: ExtentId, hold: Hold, most_bytes: int, budget_bytes: int) -> bool:
        """Return whether with this hold its user has no more than `most_bytes`, and all users no more than the budget."""
        return all(
            (account, extent) in self._readers or self.held_bytes[account] + hold.size_bytes <= limit_bytes
            for account, limit_bytes in ((hold.user, most_bytes), (ALL_USERS, budget_bytes))
        )

    def begin(self, extent: ExtentId, hold: Hold) -> None:
        """Count one more reader of an extent."""
        for account in (hold.user, ALL_USERS) if hold.size_bytes else ():
            if (account, extent) not in self._readers:
                self.held_bytes[account] += hold.size_bytes
            self._readers[account, extent] += 1
            self.sizes[extent] = hold.size_bytes

    def end(self, extent: ExtentId, hold: Hold) -> None:
        """Count one reader less."""
        for account in (hold.user, ALL_USERS) if hold.size_bytes else ():
            self._readers[account, extent] -= 1
            if not self._readers[account, extent]:
                del self._readers[account, extent]
                if account is ALL_USERS:
                    del self.sizes[extent]
                self.held_bytes[account] -= hold.size_bytes
                if not self.held_bytes[account]:
                    del self.held_bytes[account]
