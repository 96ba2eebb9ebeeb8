"""One node's decisions: `handle(event, now) -> [command]`, with no clock, randomness or IO.

A copy is an extent's bytes in one tier. An extent has one copy, or two while RAM reads ahead of NVMe.

    state      event                      next       what happens
    (absent)   room is reserved           FILLING    StartFill
    FILLING    Filled                     RESIDENT   Grant to every waiter
    FILLING    FillFailed                 (absent)   bytes free; waiters wait for a retry or get Fail; where the
                                                     tier failed, they are placed again or get Refuse
    RESIDENT   Demanded                   RESIDENT   Grant: the lease begins here, in one step
    RESIDENT   Released, ReaderGone       RESIDENT   the lease ends; unused, it goes on its shelf
    RESIDENT   room is needed             EVICTING   Evict, only from a shelf
    RESIDENT   Corrupt, FillAgain,        RESIDENT   doomed: never granted, evicted once unused; leases of a
               CommitFailed                          corrupt file end here
    EVICTING   Evicted                    (absent)   bytes free

What is on a shelf is used by nobody: not leased, not filled from, not being committed, not pinned. Only
shelves are evicted from, so what is granted or protected cannot go. Shelves are per role: KEPT (a claim's
share), AHEAD (a plan's window), LRU. `core/tiering/policy.py` says which shelf gives way to whom.

Single flight is the state FILLING with waiters. An extent with waiters is FILLING, queued for room, or due
for a retry; nothing else. The queue is fed whenever something changed: its head starts when it has a slot
and room, waits while room is on its way (an eviction, a commit, a fill nobody waits for: all of them end by
themselves), and is refused when only readers could free it. Then come what was lost, plans, prefetches.

Bytes are reserved before a fill and free only after `Evicted` or `FillFailed`, so a budget is never
exceeded by what is filling, resident, evicting and held together. An extent goes where room is free before
anything is evicted, RAM first; RAM gives way only when NVMe is full too, so nothing is demoted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from cachesvc.core import events as ev
from cachesvc.core.lookahead.lookahead import Lookahead
from cachesvc.core.lookahead.plan_windows import Windows
from cachesvc.core.lookahead.plans import Plans
from cachesvc.core.model import DatasetId, ExtentId, TierName
from cachesvc.core.node import invariants as check
from cachesvc.core.node.claims import Claims
from cachesvc.core.node.completions import Answers
from cachesvc.core.node.prefetch import Prefetches
from cachesvc.core.node.readers import Readers
from cachesvc.core.node.reclaim import Asking
from cachesvc.core.node.scrub import Scrub
from cachesvc.core.node.status import Counters, Progress, Status, TierStatus
from cachesvc.core.node.tier_outages import Outages
from cachesvc.core.records.incremental import Steps
from cachesvc.core.records.moment import Moment
from cachesvc.core.records.state import Phase
from cachesvc.core.tiering.copies import UNDECLARED, Copies
from cachesvc.core.tiering.policy import Policy, Settings, TierSpec

QUIET = frozenset(
    {
        ev.Demanded,
        ev.NotGranted,
        ev.Released,
        ev.ReaderGone,
        ev.Held,
        ev.Leased,
        ev.Committed,
        ev.Corrupt,
        ev.FillAgain,
        ev.Verified,
        ev.Tick,
    }
)
"""Events that may change nothing that a fill waits for; who handles one says when it does."""


class Node:
    """The state machine. Every method is synchronous and belongs to one caller."""

    def __init__(self, tiers: Sequence[TierSpec], settings: Settings | None = None) -> None:
        self.policy = Policy(tiers, settings or Settings())
        self._moment = Moment()
        self.copies = Copies(self.policy, self._moment)
        self.steps = Steps(self.policy.settings.claim_step)
        self.prefetches = Prefetches(self.copies, self.steps)
        self.claims = Claims(self.copies, self.steps, self.prefetches)
        windows = Windows(self.policy.reserve, self._moment)
        self.plans = Plans(self.copies, self.steps, windows)
        self.lookahead = Lookahead(self.copies, self.plans, windows)
        self.readers = Readers(self.copies, self.plans)
        self.asking = Asking(self.copies, self.readers)
        self.scrub = Scrub(self.copies, self.policy.settings.scrub_bytes_per_s)
        self.outages = Outages(self.copies, self.readers, self.prefetches, self.scrub)
        self.answers = Answers(self.copies, self.readers, self.prefetches, self.scrub, self.outages)
        self._more = False
        self._handlers: dict[type, Callable[[Any], None]] = {
            ev.Demanded: self.readers.demand,
            ev.NotGranted: self.readers.not_granted,
            ev.Released: self.readers.release,
            ev.ReaderGone: self.readers.gone,
            ev.Held: self.readers.held,
            ev.Leased: self.readers.take_over,
            ev.Filled: self.answers.filled,
            ev.FillFailed: self.answers.fill_failed,
            ev.Committed: self.answers.committed,
            ev.CommitFailed: self.answers.commit_failed,
            ev.Evicted: self.answers.evicted,
            ev.Corrupt: self.answers.corrupt,
            ev.FillAgain: self.answers.fill_again,
            ev.Recovered: self.outages.recovered,
            ev.Stalled: self.outages.stalled,
            ev.TierLost: self.outages.lost,
            ev.TierBack: self.outages.back,
            ev.Renewed: self.outages.renewed,
            ev.Resized: self.outages.resized,
            ev.Verified: self.scrub.verified,
            ev.Passed: self.plans.passed,
            ev.Planned: self.plans.begin,
            ev.PlanEnded: self.plans.ended,
            ev.DatasetDeclared: self.claims.declare,
            ev.JobEnded: self._job_ended,
            ev.Prefetched: self.prefetches.begin,
            ev.Pinned: self.claims.pin,
            ev.Unpinned: self.claims.unpin,
            ev.EvictAsked: self.claims.evict,
            ev.Tick: self._tick,
        }

    def handle(self, event: ev.Event, now: float) -> list[ev.Command]:
        """Take one event at time `now` (seconds, never going back); the commands that follow, in order."""
        self._moment.begin(now, type(event) not in QUIET)
        self._handlers[type(event)](event)
        self.outages.shrink()
        if self._moment.changed:
            self._feed()
        return self._moment.commands

    def next_deadline(self) -> float:
        """When the next `Tick` is owed, in seconds; inf while nothing waits for time. It is now where one event's
        share of look-ahead, prefetch or steps was done and there is more."""
        return (
            self._moment.now
            if self._more
            else min(self.answers.next_alarm(), self.scrub.next_deadline(), self.asking.next_deadline())
        )

    def progress(self, job: int) -> Progress:
        """How much of a job's datasets is resident."""
        return self.claims.progress(job)

    def counters(self, dataset: DatasetId) -> Counters:
        """A dataset's hits, misses and bytes from the source, and the bound."""
        return self.claims.counters(dataset)

    def status(self) -> Status:
        """A snapshot of budgets, datasets and queues."""
        tiers = tuple(
            TierStatus(
                tier=tier.name,
                budget_bytes=tier.budget_bytes,
                used_bytes=tier.used_bytes,
                kept_bytes=tier.kept_bytes,
                held_bytes=tier.held_bytes,
                evicting_bytes=tier.evicting_bytes,
                reserve_bytes=tier.reserve_bytes,
                lost=tier.lost,
                stalled=tier.stalled,
                full=bool(tier.full_until),
                corrupt_count=tier.corrupt_count,
                scrubbed_bytes=tier.scrubbed_bytes,
                evicted_bytes=tier.evicted_bytes,
            )
            for tier in self.policy.tiers.values()
        )
        return Status(
            tiers=tiers,
            datasets=tuple(self.counters(name) for name in self.policy.shares.datasets),
            undeclared=self.counters(UNDECLARED),
            fills=len(self.copies.filling),
            queued=len(self.readers.queue),
            plans=len(self.plans.plans),
        )

    def where(self, extent: ExtentId) -> TierName | None:
        """The tier that a demand would be granted from now; None where it is not resident."""
        for tier in self.policy.tiers.values():
            if extent in tier.found and not tier.lost:
                return tier.name
        entry = self.copies.entries.get(extent)
        copy = entry.best() if entry else None
        return copy.tier.name if copy else None

    def resident_in(self, tier: TierName) -> set[ExtentId]:
        """The extents with a resident copy in a tier. O(extents)."""
        found = self.policy.tiers[tier]
        return {c.entry.id for c in self.copies.of(found) if c.phase is Phase.RESIDENT}.union(found.found)

    def check(self) -> None:
        """Assert every invariant. O(extents): for tests and simulation."""
        check.check(self)

    def _feed(self) -> None:
        """Start what can start, the most urgent first. What must wait keeps those behind it waiting."""
        self._moment.fed()
        self._more = bool(self.steps)
        self.outages.reopen()
        if self.readers.feed() and self.prefetches.feed_again():
            plans_done = self.lookahead.feed()
            prefetches_done = self.prefetches.feed()
            self._more |= not (plans_done and prefetches_done)
        self.asking.feed()

    def _tick(self, _: ev.Tick) -> None:
        if place := self.scrub.next(self._moment.now):
            self._moment.tell(ev.Verify(*place))
        if self._more:
            self._moment.change()
        self.steps.advance()
        self.answers.ring()
        if self.asking.next_deadline() <= self._moment.now:
            self.asking.feed()

    def _job_ended(self, event: ev.JobEnded) -> None:
        self.plans.end_job(event.job)
        self.claims.end_job(event.job)
