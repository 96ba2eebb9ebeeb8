"""The open tiers and the threads that run their calls.

A disk has four threads: one opens files for grants, one commits, one probes, one does everything else. The RAM tier has
one.

At the end calls under way finish, queued ones are dropped, and no disk delays the end by more than `CLOSE_S`. A disk that
does not answer is abandoned: its locks are released for the next daemon.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from cachesvc.core.errors import CacheError
from cachesvc.core.model import RAM, TierName
from cachesvc.core.records.residency import TierState
from cachesvc.daemon.disks.opening import DirectoryOpening
from cachesvc.daemon.disks.renewal import Disk
from cachesvc.daemon.loop.lanes import Lane
from cachesvc.sources.limited_calls import LimitedCall
from cachesvc.tiers.tier import Tier

log = logging.getLogger(__name__)
CLOSE_S = 5.0
"""The wait for all disks together, enough for the commits under way."""
ENDS_S = 0.1
"""The wait for threads that no disk blocks; they end within a millisecond."""


class TierThreads:
    """Every method runs on the loop's thread."""

    def __init__(
        self,
        tiers: Mapping[TierName, TierState],
        ram: Tier,
        openings: Sequence[DirectoryOpening],
        lane: Callable[[str], Lane],
    ) -> None:
        """Starts the threads. `tiers`: all tiers, also those that are not open; `lane` makes a named thread."""
        self.disks = {each.disk.name: each.disk for each in openings}
        self.open_tiers: dict[TierName, Tier] = {RAM: ram} if RAM in tiers else {}
        """A tier whose disk never answered is missing here; the core sends it no commands."""
        self.open_tiers |= {name: disk.tier for name, disk in self.disks.items() if disk.tier is not None}
        self.calls = {name: lane(f"tier-{name}") for name in tiers}
        self.openers = {name: lane(f"open-{name}") for name in self.disks}
        self.committers = {name: lane(f"commit-{name}") for name in self.disks}
        self.probes = {each.disk.name: each.probes for each in openings}
        self.hangs = False
        """After `close`: a thread waits for a disk, and this process cannot end before the disk answers."""
        self._tiers = tiers

    def of(self, tier: TierName) -> tuple[Lane, ...]:
        """All threads of a tier but that of its probes."""
        every = (self.calls, self.openers, self.committers)
        return tuple(lanes[tier] for lanes in every if tier in lanes)

    def replace(self, name: TierName, tier: Tier) -> None:
        """Put a newly opened tier in the place of the old one, which is closed after its last call."""
        old = self.open_tiers.get(name)
        self.open_tiers[name] = tier
        if old is not None:
            close = partial(self._after_calls, name, old.close, lambda _: None)
            self.openers[name].submit(lambda: None, lambda _: close(), lambda _: None)

    def after_all(self, then: Callable[[], None]) -> None:
        """Call `then` when the tiers have finished their earlier commits and evictions, those of lost tiers excepted."""
        unfinished = {name for name, tier in self._tiers.items() if not tier.lost}

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

    def close(self, close_s: float = CLOSE_S) -> None:
        """Close the tiers after the calls under way, `close_s` for all of them, and end all threads; later calls are
        dropped. A lost tier is abandoned. Sets `hangs`."""
        every = (self.openers, self.calls, self.committers, self.probes)
        lanes = [lane for lanes in every for lane in lanes.values()]
        for lane in lanes:
            lane.close(0.0)
        deadline = time.monotonic() + close_s
        closed = [self._close(name, tier.lost, deadline) for name, tier in self._tiers.items()]
        ended = [lane.close(ENDS_S) for lane in lanes]
        self.hangs = not all(closed + ended)

    def _close(self, name: TierName, lost: bool, deadline: float) -> bool:
        calls = [lanes[name] for lanes in (self.calls, self.committers) if name in lanes]
        if not lost and close_tier(self.open_tiers[name], calls, deadline):
            return True
        return name in self.disks and abandon(self.disks[name]) and lost


def close_tier(tier: Tier, calls: Sequence[Lane], deadline: float) -> bool:
    """Close a tier once the calls under way are over; False where that takes until the deadline."""

    def close() -> None:
        try:
            tier.close()
        except CacheError as error:
            log.warning("a tier did not close cleanly", extra={"tier": tier.name, "error": str(error)})

    if not all(lane.close(_left_s(deadline)) for lane in calls):
        return False
    return LimitedCall(close, "in-time").ends_within(_left_s(deadline))


def abandon(disk: Disk) -> bool:
    """Release a disk's directory for another daemon; False where even that takes too long."""
    log.warning("a tier that does not answer is abandoned", extra={"tier": disk.name})
    return LimitedCall(disk.unlock, "in-time").ends_within(ENDS_S)


def _left_s(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())
