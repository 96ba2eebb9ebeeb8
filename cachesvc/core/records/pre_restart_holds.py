"""Memory that readers map from before our restart: each extent counts once for its user, and once for all together."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from cachesvc.core.model import ExtentId

EVERYBODY = None
"""The account in which an extent counts once, whoever holds it: all map the same memory."""


class Hold(NamedTuple):
    """Of one extent by one reader. No bytes: only its release is expected."""

    size_bytes: int
    user: int


class PreRestartHolds:
    """Bytes by user, and of `EVERYBODY`."""

    def __init__(self) -> None:
        self.held_bytes: Counter[int | None] = Counter()
        self.sizes: dict[ExtentId, int] = {}
        """Of what anybody holds."""
        self._readers: Counter[tuple[int | None, ExtentId]] = Counter()

    def fits(self, extent: ExtentId, hold: Hold, most_bytes: int, budget_bytes: int) -> bool:
        """Whether its user then holds no more than `most_bytes`, and all together no more than the budget."""
        return all(
            (who, extent) in self._readers or self.held_bytes[who] + hold.size_bytes <= limit_bytes
            for who, limit_bytes in ((hold.user, most_bytes), (EVERYBODY, budget_bytes))
        )

    def begin(self, extent: ExtentId, hold: Hold) -> None:
        """One more reader holds it."""
        for who in (hold.user, EVERYBODY) if hold.size_bytes else ():
            if (who, extent) not in self._readers:
                self.held_bytes[who] += hold.size_bytes
            self._readers[who, extent] += 1
            self.sizes[extent] = hold.size_bytes

    def end(self, extent: ExtentId, hold: Hold) -> None:
        """One reader less."""
        for who in (hold.user, EVERYBODY) if hold.size_bytes else ():
            self._readers[who, extent] -= 1
            if not self._readers[who, extent]:
                del self._readers[who, extent]
                if who is EVERYBODY:
                    del self.sizes[extent]
                self.held_bytes[who] -= hold.size_bytes
                if not self.held_bytes[who]:
                    del self.held_bytes[who]
