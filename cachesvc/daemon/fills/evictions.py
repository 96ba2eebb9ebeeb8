"""Evictions of copies, each after the copy's own commit."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from cachesvc.core import commands, events
from cachesvc.core.errors import CacheError
from cachesvc.core.model import TierName
from cachesvc.daemon.fills.checks import Checks
from cachesvc.daemon.fills.commits import Commits
from cachesvc.daemon.fills.holes import HoleRecords
from cachesvc.tiers.tier import Tier

log = logging.getLogger(__name__)


class Evictions:
    """Executes `Evict`. Runs on the loop's thread."""

    def __init__(
        self,
        tiers: Mapping[TierName, Tier],
        commits: Commits,
        checks: Checks,
        hole_records: HoleRecords,
        handle: Callable[[events.Event], None],
    ) -> None:
        self._tiers = tiers
        self._commits = commits
        self._checks = checks
        self._hole_records = hole_records
        self._handle = handle

    def evict(self, command: commands.Evict) -> None:
        """Remove a copy; `Evicted` follows, unless the tier gets another directory first."""
        tier = self._tiers[command.tier]

        def evicted(_: object) -> None:
            if self._tiers[command.tier] is not tier:
                return
            self._checks.unverified[command.tier].discard(command.extent)
            self._hole_records.evicted(command.extent, command.tier)
            self._handle(events.Evicted(command.extent, command.tier))

        def failed(error: CacheError) -> None:  # the copy is forgotten; the next start finds its file
            log.warning("an eviction failed", extra={"tier": command.tier, "error": str(error)})
            self._checks.suspect(command.tier, error)
            evicted(None)

        lane = self._commits.lane_after(command.extent, command.tier)
        lane.submit(lambda: tier.evict(command.extent), evicted, failed)
