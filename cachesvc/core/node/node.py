"""One node's decisions: `handle(event, now) -> [command]`, with no clock, randomness or IO.

A copy is an extent's bytes in one tier. `core/records/copy_phases.py` holds the table of its phases.

Copies are evicted from eviction lists only. A copy is on a list exactly while it is idle and not pinned: not leased, not
filled from, not being committed. So a copy that is granted or protected cannot be evicted. Each role has its lists: KEPT
(the share of a claim), AHEAD (the window of a plan), LRU. `core/tiering/policy.py` decides from which list room is made.

Fills are single-flight: an extent with waiters is filling, queued for room, or due for a retry. Whenever something
changed, the node starts fills, in this order: what peers want of it, waiting readers, lost extents, plans, prefetches.
The head of the queue starts when it has a slot and room. It waits while room is coming without a reader's doing (an
eviction, a commit, a fill without waiters). It is refused when only readers could free room.

Bytes are reserved before a fill, and free only after `Evicted` or `FillFailed`. So filling, resident, evicting and held
bytes together never exceed a budget. An extent goes where room is free before anything is evicted, RAM first. RAM
evicts only when NVMe is full too, so nothing is demoted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from cachesvc.core import commands as cmd
from cachesvc.core import events as ev
from cachesvc.core.lookahead.lookahead import Lookahead
from cachesvc.core.lookahead.order_windows import OrderWindows
from cachesvc.core.lookahead.plans import Plans
from cachesvc.core.model import DatasetId, ExtentId, ReaderId, TierName
from cachesvc.core.node.claims import Claims
from cachesvc.core.node.completions import Completions
from cachesvc.core.node.keeping import Keeping
from cachesvc.core.node.prefetch import Prefetches
from cachesvc.core.node.readers import Readers
from cachesvc.core.node.reclaim import Reclaim
from cachesvc.core.node.scrub import Scrub
from cachesvc.core.node.status import Counters, PrefetchProgress, ReaderStatus
from cachesvc.core.node.tier_outages import Outages
from cachesvc.core.records.copy_phases import Phase
from cachesvc.core.records.event_context import EventContext
from cachesvc.core.records.incremental import IncrementalWork
from cachesvc.core.tiering.copies import Copies
from cachesvc.core.tiering.fill_starts import FillStarts
from cachesvc.core.tiering.policy import NodeSettings, Policy, TierSpec
from cachesvc.core.tiering.role_changes import RoleChanges

LAST_ROWS = 64
"""Rows among which the last step of a plan is looked for: rows are sorted by their first steps."""


class Node:
    """The state machine. Every method is synchronous; one thread calls them."""

    def __init__(self, tiers: Sequence[TierSpec], settings: NodeSettings | None = None) -> None:
        self.policy = Policy(tiers, settings or NodeSettings())
        self._context = EventContext()
        self.copies = Copies(self.policy, self._context)
        roles = RoleChanges(self.copies)
        self.work = IncrementalWork(self.policy.settings.claim_step)
        self.preparers = self.copies.preparers
        starts = FillStarts(self.copies, self.preparers)
        self.prefetches = Prefetches(self.copies, self.work, starts)
        self.claims = Claims(self.copies, roles, self.work, self.prefetches)
        windows = OrderWindows(self.policy.reserve, self._context)
        self.plans = Plans(self.copies, self.work, windows)
        self.lookahead = Lookahead(self.copies, self.plans, windows, starts)
        self.readers = Readers(self.copies, self.plans, starts)
        self.reclaim = Reclaim(self.copies, self.readers)
        self.keeping = Keeping(self.copies, roles, self.work)
        self.scrub = Scrub(self.copies, self.policy.settings.scrub_bytes_per_s)
        self.outages = Outages(self.copies, roles, self.readers, self.prefetches, self.scrub)
        self.completions = Completions(self.copies, self.readers, self.prefetches, self.scrub, self.outages)
        self._more = False
        self._changing: dict[type, Callable[[Any], None]] = {
            ev.Filled: self.completions.filled,
            ev.FillFailed: self.completions.fill_failed,
            ev.CommitFailed: self.completions.commit_failed,
            ev.Evicted: self.completions.evicted,
            ev.Recovered: self.outages.recovered,
            ev.Stalled: self.outages.stalled,
            ev.TierLost: self.outages.lost,
            ev.TierBack: self.outages.back,
            ev.Renewed: self.outages.renewed,
            ev.Resized: self.outages.resized,
            ev.Passed: self.plans.passed,
            ev.Planned: self._planned,
            ev.PlanEnded: self.plans.ended,
            ev.DatasetDeclared: self.claims.declare,
            ev.JobEnded: self._job_ended,
            ev.Prefetched: self.prefetches.begin,
            ev.Pinned: self.claims.pin,
            ev.Unpinned: self.claims.unpin,
            ev.QuotasChanged: self.claims.requote,
            ev.EvictAsked: self.claims.evict,
            ev.ViewChanged: self.keeping.view_changed,
            ev.PreparerJoined: self.preparers.joined,
            ev.PreparerStalled: self.preparers.stalled,
            ev.CopyFound: starts.found,
        }
        """Events that always change what fills may start. Handlers of others call `mark_changed` where they do."""
        self._handlers: dict[type, Callable[[Any], None]] = self._changing | {
            ev.Demanded: self.readers.demand,
            ev.NotGranted: self.readers.not_granted,
            ev.Released: self.readers.release,
            ev.ReaderGone: self._reader_gone,
            ev.HoldReported: self.readers.hold,
            ev.Committed: self.completions.committed,
            ev.Corrupt: self.completions.corrupt,
            ev.FillAgain: self.completions.fill_again,
            ev.Verified: self.scrub.verified,
            ev.PeerWants: self.keeping.peer_wants,
            ev.Tick: self._tick,
        }

    def handle(self, event: ev.Event, now: float) -> list[cmd.Command]:
        """Handle one event at time `now` (seconds, never going back). Returns the commands that follow, in order."""
        self._context.begin(now, type(event) in self._changing)
        self._handlers[type(event)](event)
        self.outages.shrink()
        if self._context.changed:
            self._feed()
        return self._context.commands

    def next_deadline(self) -> float:
        """The time when the next `Tick` is owed, in seconds; inf while nothing waits for time. It is the current time while
        look-ahead, prefetch or incremental work has more to do than one event may."""
        return (
            self._context.now
            if self._more
            else min(self.completions.next_alarm(), self.scrub.next_deadline(), self.reclaim.next_deadline())
        )

    def progress(self, job: int) -> PrefetchProgress:
        """Report how much of a job's datasets is resident."""
        return self.claims.progress(job)

    def counters(self, dataset: DatasetId) -> Counters:
        """A dataset's hits, misses and bytes from the source, and the bound."""
        return self.claims.counters(dataset)

    def reader(self, reader: ReaderId) -> ReaderStatus:
        """Return a reader's leases and waits, and its place in its plan, which has the reader's number."""
        plan, status = self.plans.plans.get(reader), self.readers.status(reader)
        if plan is None or not plan.rows:
            return status
        steps = max(last_step for _, _, last_step in plan.rows[-LAST_ROWS:]) + 1
        return replace(status, step=min(plan.passed, steps), steps=steps)

    def where(self, extent: ExtentId) -> TierName | None:
        """The tier from which a demand would be granted now; None where the extent is not resident."""
        for tier in self.policy.tiers.values():
            if extent in tier.dormant and not tier.lost:
                return tier.name
        entry = self.copies.entries.get(extent)
        copy = entry.best() if entry else None
        return copy.tier.name if copy else None

    def size_of(self, extent: ExtentId) -> int:
        """The size of an extent in bytes as this node knows it; 0 where it does not know the extent."""
        entry = self.copies.entries.get(extent)
        if entry is not None:
            return entry.size_bytes
        dormant = (tier.dormant.get(extent) for tier in self.policy.tiers.values())
        return next((size_bytes for size_bytes in dormant if size_bytes is not None), 0)

    def will_keep(self, extent: ExtentId) -> bool:
        """Return whether an extent is resident, is being filled, or will be as soon as an eviction ends."""
        return self.where(extent) is not None or self.keeping.will_keep(extent)

    def resident_in(self, tier: TierName) -> set[ExtentId]:
        """The extents with a resident copy in a tier. O(extents)."""
        state = self.policy.tiers[tier]
        resident = {c.entry.id for c in self.copies.copies_in(state) if c.phase is Phase.RESIDENT}
        return resident.union(state.dormant)

    def _feed(self) -> None:
        """Start the fills that can start, the most urgent first. One that must wait holds back those behind it."""
        self._context.clear_changed()
        self._more = bool(self.work)
        self.outages.reopen()
        self.keeping.feed()
        if self.readers.feed() and self.prefetches.feed_refills():
            plans_done = self.lookahead.feed()
            prefetches_done = self.prefetches.feed()
            self._more |= not (plans_done and prefetches_done)
        self.reclaim.feed()

    def _tick(self, _: ev.Tick) -> None:
        if place := self.scrub.next(self._context.now):
            self._context.emit(cmd.Verify(*place))
        if self._more:
            self._context.mark_changed()
        self.work.advance()
        self.completions.ring()
        if self.reclaim.next_deadline() <= self._context.now:
            self.reclaim.feed()

    def _reader_gone(self, event: ev.ReaderGone) -> None:
        if self.preparers.leave(event.reader):
            self._context.mark_changed()
        self.readers.disconnect(event)

    def _planned(self, event: ev.Planned) -> None:
        self.keeping.planned(event)
        self.plans.begin(event)

    def _job_ended(self, event: ev.JobEnded) -> None:
        self.plans.end_job(event.job)
        self.keeping.job_ended(event.job)
        self.claims.end_job(event.job)
