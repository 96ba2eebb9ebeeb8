"""All fills under way, and evictions: they begin when the core says so. A fill ends early where its tier is lost."""

from __future__ import annotations

import logging

from cachesvc.core import commands, events
from cachesvc.core.errors import CacheError, SourceUnavailable, TierFailed
from cachesvc.core.model import TierName
from cachesvc.daemon.fills.fill import Fill
from cachesvc.daemon.fills.fill_counts import FillCounts
from cachesvc.daemon.fills.fill_parts import FillParts
from cachesvc.daemon.loop.steps import Sequence

log = logging.getLogger(__name__)


class Fills:
    """Executes `StartFill` and `Evict`. Runs on the loop's thread."""

    def __init__(self, parts: FillParts) -> None:
        self._parts = parts
        self.counts = FillCounts()
        self._under_way: dict[Fill, Sequence] = {}
        self._paused = False

    def start(self, command: commands.StartFill) -> None:
        """Begin a fill; `Filled` or `FillFailed` follows, and for a disk `Committed` or `CommitFailed`."""
        if self._paused:
            return
        fill = Fill(command, self._parts, self.counts)
        self._under_way[fill] = Sequence(fill.steps(), lambda: self._under_way.__delitem__(fill))
        self._under_way[fill].start()

    def pause(self) -> None:
        """Begin no more fills: their readers wait, until another daemon fills for them."""
        self._paused = True

    @property
    def under_way(self) -> int:
        """The number of fills and commits that have begun."""
        return len(self._under_way)

    def reading(self) -> list[Fill]:
        """The fills whose bytes have not all come, the oldest first."""
        return [fill for fill in self._under_way if not fill.filled]

    def fail_tier(self, name: TierName, why: str) -> None:
        """Answer all fills into or from a tier as failed. Their rooms are freed after the calls under way."""
        for fill in [fill for fill in self._under_way if not fill.filled]:
            tier, origin = fill.command.tier, fill.command.from_tier
            if name in (tier, origin):
                failure: type[CacheError] = TierFailed if tier == name else SourceUnavailable
                fill.abort().begin(lambda _: None, lambda _: None)
                self._end(fill, failure(f"{name}: {why}"))

    def tier_lost(self, name: TierName, why: str) -> None:
        """Answer all fills and commits of a lost tier as failed."""
        self.fail_tier(name, why)
        for fill in [fill for fill in self._under_way if fill.filled and fill.command.tier == name]:
            self._end(fill, TierFailed(f"{name}: {why}"))

    def evict(self, command: commands.Evict) -> None:
        """Remove a copy, after its own commit; `Evicted` follows, unless the tier gets another directory first."""
        parts = self._parts
        tier = parts.tiers[command.tier]

        def evicted(_: object) -> None:
            if parts.tiers[command.tier] is not tier:
                return
            parts.checks.unverified[command.tier].discard(command.extent)
            parts.hole_records.evicted(command.extent, command.tier)
            parts.handle(events.Evicted(command.extent, command.tier))
            if parts.sent is not None:
                parts.sent.evicted(command.extent)

        def failed(error: CacheError) -> None:  # the copy is forgotten; the next start finds its file
            log.warning("an eviction failed", extra={"tier": command.tier, "error": str(error)})
            parts.checks.suspect(command.tier, error)
            evicted(None)

        lane = parts.commits.lane_after(command.extent, command.tier)
        lane.submit(lambda: tier.evict(command.extent), evicted, failed)

    def _end(self, fill: Fill, failure: CacheError) -> None:
        sequence = self._under_way.pop(fill, None)
        if sequence is not None:  # else the core ended it when it heard of another's end
            sequence.cancel()
            self._parts.handle(fill.failed(failure, retry=True))
