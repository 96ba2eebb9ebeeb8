"""The daemon's reactions to a disk that stalls, is lost, works again, or has another directory or size."""

from __future__ import annotations

import logging

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


class DiskReactions:
    """Called by the watch over the disks, on the loop's thread."""

    def __init__(
        self,
        runner: Runner,
        threads: TierThreads,
        budgets: Budgets,
        fillers: FillerPool,
        fills: Fills,
        checks: Checks,
        granting: Granting,
        hole_records: HoleRecords,
    ) -> None:
        self._node, self._handle = runner.node, runner.handle
        self._threads = threads
        self._budgets = budgets
        self._fillers = fillers
        self._fills = fills
        self._checks = checks
        self._granting = granting
        self._hole_records = hole_records

    def stalled(self, name: TierName, stalled: bool) -> None:
        """Send fills elsewhere until the disk answers or is lost, in fillers that do not wait for it."""
        log.warning("a disk %s", "does not answer" if stalled else "answers again", extra={"tier": name})
        self._handle(events.Stalled(name, stalled))
        if stalled:
            self._fillers.retire(name)
            self._fills.fail_tier(name, "it does not answer")

    def lost(self, name: TierName, why: str) -> None:
        """Answer all that wait for the tier; its threads abort calls that finish later."""
        record(Event("tier_lost", tier=name, why=why))
        self._handle(events.TierLost(name))
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
        self._handle(events.TierBack(name))

    def measured(self, name: TierName, room: Room) -> None:
        """Adapt the tier's budget to the room on its disk; a room of 0 bytes is unknown."""
        if not room.total_bytes:
            return
        tier = self._node.policy.tiers[name]
        budget_bytes = self._budgets.measured(name, room, tier.used_bytes)
        if budget_bytes != tier.given_bytes:
            self._handle(events.Resized(name, budget_bytes))

    def _renew(self, name: TierName, successor: Successor) -> None:
        self._threads.replace(name, successor.tier)
        log.warning("another cache directory", extra={"tier": name, "extents": len(successor.extents)})
        self._checks.renewed(name)
        self._hole_records.renewed(name)
        self._budgets.renewed(name)
        self._handle(events.Renewed(name, successor.extents))
        self.measured(name, successor.room)
