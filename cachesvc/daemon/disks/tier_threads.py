"""The open tiers and the threads that run their calls.

A disk has three threads: one opens files for grants, one commits, one does everything else. The RAM tier has one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from functools import partial

from cachesvc.core.model import TierName
from cachesvc.daemon.disks.closing import CLOSE_S, abandon, all_ended, close_tier
from cachesvc.daemon.disks.renewal import Disk
from cachesvc.daemon.loop.lanes import Lane
from cachesvc.tiers.tier import Tier


class TierThreads:
    """Every method runs on the loop's thread."""

    def __init__(
        self, tiers: Collection[TierName], disks: Mapping[TierName, Disk], lane: Callable[[str], Lane]
    ) -> None:
        """Starts the threads. `tiers`: all tiers, also those that are not open; `lane` makes a named thread."""
        self.open_tiers: dict[TierName, Tier] = {}
        """A tier whose disk never answered is missing here; the core sends it no commands."""
        self.calls = {name: lane(f"tier-{name}") for name in tiers}
        self.openers = {name: lane(f"open-{name}") for name in disks}
        self.committers = {name: lane(f"commit-{name}") for name in disks}
        self._disks = disks

    def of(self, tier: TierName) -> tuple[Lane, ...]:
        """All threads of a tier."""
        every = (self.calls, self.openers, self.committers)
        return tuple(lanes[tier] for lanes in every if tier in lanes)

    def replace(self, name: TierName, tier: Tier) -> None:
        """Put a newly opened tier in the place of the old one, which is closed after its last call."""
        old = self.open_tiers.get(name)
        self.open_tiers[name] = tier
        if old is not None:
            close = partial(self._after_calls, name, old.close, lambda _: None)
            self.openers[name].submit(lambda: None, lambda _: close(), lambda _: None)

    def after_all(self, tiers: Collection[TierName], then: Callable[[], None]) -> None:
        """Call `then` when the tiers have finished the commits and evictions that were submitted before."""
        unfinished = set(tiers)

        def finished(name: TierName, _: object = None) -> None:
            unfinished.discard(name)
            if not unfinished:
                then()

        for name in tuple(unfinished):
            self._after_calls(name, lambda: None, partial(finished, name))
        if not unfinished:
            then()

    def _after_calls(self, name: TierName, work: Callable[[], None], then: Callable[[object], None]) -> None:
        """Run `work` after all commits and other calls of a tier that were submitted before, then `then`."""
        last = partial(self.calls[name].submit, work, then, then)
        committer = self.committers.get(name)
        if committer is None:
            last()
        else:
            committer.submit(lambda: None, lambda _: last(), lambda _: last())

    def stop(self) -> None:
        """Tell every thread to end after the call under way."""
        for lane in self._lanes():
            lane.close(0.0)

    def close_tiers(self, lost: Collection[TierName]) -> bool:
        """Close the tiers, `CLOSE_S` for all of them; a lost one is abandoned. False where a disk hangs."""
        deadline = time.monotonic() + CLOSE_S
        return all([self._close(name, name in lost, deadline) for name in self.calls])

    def ended(self) -> bool:
        """Tell whether all threads have ended."""
        return all_ended(self._lanes())

    def _close(self, name: TierName, lost: bool, deadline: float) -> bool:
        calls = [lanes[name] for lanes in (self.calls, self.committers) if name in lanes]
        if not lost and close_tier(self.open_tiers[name], calls, deadline):
            return True
        return name in self._disks and abandon(self._disks[name]) and lost

    def _lanes(self) -> list[Lane]:
        return [*self.openers.values(), *self.calls.values(), *self.committers.values()]
