"""The daemon's reactions to a disk that stalls, is lost, works again, or has another directory or size."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from cachesvc.core import events
from cachesvc.core.model import TierName
from cachesvc.daemon.disks.budgets import Budgets
from cachesvc.daemon.disks.renewal import Successor
from cachesvc.daemon.disks.tier_threads import TierThreads
from cachesvc.daemon.events.event import Event, record
from cachesvc.daemon.fills.checks import Checks
from cachesvc.daemon.fills.fills import Fills
from cachesvc.daemon.fills.holes import HoleRecords
from cachesvc.daemon.fills.pool import FillerPool
from cachesvc.daemon.grants.granting import Granting
from cachesvc.daemon.runner import Runner
from cachesvc.tiers.probe import Room

log = logging.getLogger(__name__)


@dataclass(eq=False)
class DiskReactions:
    """Called by the watch over the disks, on the loop's thread."""

    _runner: Runner
    _threads: TierThreads
    _budgets: Budgets
    _fillers: FillerPool
    _fills: Fills
    _checks: Checks
    _granting: Granting
    _hole_records: HoleRecords

    def stalled(self, name: TierName, stalled: bool) -> None:
        """Send fills elsewhere until the disk answers or is lost, in fillers that do not wait for it."""
        log.warning("a disk %s", "does not answer" if stalled else "answers again", extra={"tier": name})
        self._runner.handle(events.Stalled(name, stalled))
        if stalled:
            self._fillers.retire(name)
            self._fills.fail_tier(name, "it does not answer")

    def lost(self, name: TierName, why: str) -> None:
        """Answer all that wait for the tier; its threads abort calls that finish later."""
        record(Event("tier_lost", tier=name, why=why))
        self._runner.handle(events.TierLost(name))
        self._fills.tier_lost(name, why)
        self._granting.tier_lost(name)
        self._fillers.tier_lost(name)  # last: the jobs that this answers find all of the above done

    def back(self, name: TierName) -> None:
        """Use the tier again, in another directory where the disk has a successor."""
        successor = self._threads.disks[name].take()
        if successor is not None:
            self._renew(name, successor)
        record(Event("tier_back", tier=name))
        self._checks.tier_back(name)
        self._runner.handle(events.TierBack(name))

    def measured(self, name: TierName, room: Room) -> None:
        """Adapt the tier's budget to the room on its disk; a room of 0 bytes is unknown."""
        if not room.total_bytes:
            return
        tier = self._runner.node.policy.tiers[name]
        budget_bytes = self._budgets.measured(name, room, tier.used_bytes)
        if budget_bytes != tier.given_bytes:
            if not (tier.lost or (budget_bytes and tier.given_bytes)):
                record(Event("tier_room" if budget_bytes else "tier_taken", tier=name))
            self._runner.handle(events.Resized(name, budget_bytes))

    def _renew(self, name: TierName, successor: Successor) -> None:
        self._threads.replace(name, successor.tier)
        log.warning("another cache directory", extra={"tier": name, "extents": len(successor.extents)})
        self._checks.renewed(name)
        self._hole_records.renewed(name)
        self._budgets.renewed(name)
        self._runner.handle(events.Renewed(name, successor.extents))
        self.measured(name, successor.room)
