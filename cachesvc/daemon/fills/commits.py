"""Commits to disks, each disk's on a thread of its own: a sync may take seconds, and fills need the disk meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from cachesvc.core.errors import CacheError
from cachesvc.core.model import ExtentId, TierName
from cachesvc.daemon.loop.lanes import Lane

MOST = 32
"""With so many commits of a tier not done, no fill of it begins; those that had are as many again at most. Each has a file
open, and is fetched again if the daemon ends before it."""


class Commits:
    """Runs on the loop's thread. An extent that is evicted while its commit goes on (its tier was lost) is removed after
    that, on the same thread."""

    def __init__(self, lanes: Mapping[TierName, Lane], others: Mapping[TierName, Lane]) -> None:
        """`lanes`: of commits, for each disk; `others`: of whatever else is asked of a tier."""
        self._lanes = lanes
        self._others = others
        self._owed: dict[TierName, set[ExtentId]] = {tier: set() for tier in others}
        self._waiting: dict[TierName, list[Callable[[], None]]] = {tier: [] for tier in others}

    def submit(
        self,
        extent: ExtentId,
        tier: TierName,
        work: Callable[[], None],
        then: Callable[[None], None],
        otherwise: Callable[[CacheError], None],
    ) -> None:
        """Commit an extent: run `work`, then `then` or `otherwise`."""
        self._owed[tier].add(extent)

        def over(answer: Callable[[], None]) -> None:
            self._owed[tier].discard(extent)
            answer()
            if len(self._owed[tier]) < MOST:
                waited, self._waiting[tier] = self._waiting[tier], []
                for each in waited:
                    each()

        self._lanes[tier].submit(
            work, lambda done: over(partial(then, done)), lambda error: over(partial(otherwise, error))
        )

    def when_few(self, tier: TierName, then: Callable[[], None]) -> None:
        """Call `then` at once, or when fewer than `MOST` commits are not done."""
        if len(self._owed[tier]) < MOST:
            then()
        else:
            self._waiting[tier].append(then)

    def after(self, extent: ExtentId, tier: TierName) -> Lane:
        """The thread on which a call about an extent comes after its commit."""
        return self._lanes[tier] if extent in self._owed[tier] else self._others[tier]
