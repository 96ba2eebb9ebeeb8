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
    RESIDENT   Corrupt, CommitFailed      RESIDENT   doomed: never granted, evicted once unused; leases of a
                                                     corrupt file end here
    EVICTING   Evicted                    (absent)   bytes free

What is on a shelf is used by nobody: not leased, not filled from, not being committed, not pinned. Only
shelves are evicted from, so what is granted or protected cannot go. Shelves are per role: KEPT (a claim's
share), AHEAD (a plan's window), LRU. `policy.py` says which shelf gives way to whom.

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

from cachesvc.core import check
from cachesvc.core import events as ev
from cachesvc.core.claims import Claims
from cachesvc.core.copies import UNDECLARED, Copies
from cachesvc.core.errors import OutOfSpace, TierFailed
from cachesvc.core.lookahead import Lookahead
from cachesvc.core.model import RAM, DatasetId, ExtentId, TierName
from cachesvc.core.moment import Moment
from cachesvc.core.policy import Policy, Settings, TierSpec
from cachesvc.core.readers import Readers
from cachesvc.core.report import Counters, Progress, Status, TierStatus
from cachesvc.core.retries import Alarms, backoff_s
from cachesvc.core.scrub import Scrub
from cachesvc.core.state import Copy, Entry, Phase, Tier
from cachesvc.core.steps import Steps

QUIET = frozenset(
    {
        ev.Demanded,
        ev.Released,
        ev.ReaderGone,
        ev.Held,
        ev.Leased,
        ev.Committed,
        ev.Corrupt,
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
        self.steps = Steps()
        self.claims = Claims(self.copies, self.steps)
        self.lookahead = Lookahead(self.copies, self.steps)
        self.readers = Readers(self.copies)
        self.alarms = Alarms()
        self.scrub = Scrub(self.copies, self.policy.settings.scrub_bytes_per_s)
        self._more = False
        self._handlers: dict[type, Callable[[Any], None]] = {
            ev.Demanded: self.readers.demand,
            ev.Released: self.readers.release,
            ev.ReaderGone: self.readers.gone,
            ev.Held: self.readers.held,
            ev.Leased: self.readers.take_over,
            ev.Filled: self._filled,
            ev.FillFailed: self._fill_failed,
            ev.Committed: self._committed,
            ev.CommitFailed: self._commit_failed,
            ev.Evicted: self._evicted,
            ev.Corrupt: self._corrupt,
            ev.Recovered: self._recovered,
            ev.TierLost: self._tier_lost,
            ev.TierBack: self._tier_back,
            ev.Renewed: self._renewed,
            ev.Resized: self._resized,
            ev.Verified: self._verified,
            ev.Passed: self.lookahead.passed,
            ev.Planned: self.lookahead.begin,
            ev.PlanEnded: lambda event: self.lookahead.end(event.plan),
            ev.DatasetDeclared: self.claims.declare,
            ev.JobEnded: self._job_ended,
            ev.Prefetched: self.claims.prefetch,
            ev.Pinned: self.claims.pin,
            ev.Unpinned: self.claims.unpin,
            ev.EvictAsked: self.claims.evict,
            ev.Tick: self._tick,
        }

    def handle(self, event: ev.Event, now: float) -> list[ev.Command]:
        """Take one event at time `now` (seconds, never going back); the commands that follow, in order."""
        self._moment.begin(now)
        if type(event) not in QUIET:
            self._moment.change()
        self._handlers[type(event)](event)
        # a budget that shrank under a fill or a lease is met once it ends
        for tier in self.policy.tiers.values():
            if tier.budget_bytes + tier.evicting_bytes < tier.used_bytes + tier.held_bytes:
                self._shrink(tier)
        if self._moment.changed:
            self._feed()
        return self._moment.commands

    def next_deadline(self) -> float:
        """When the next `Tick` is owed, in seconds; inf while nothing waits for time. It is now where one event's
        share of look-ahead, prefetch or steps was done and there is more."""
        return self._moment.now if self._more else min(self.alarms.next(), self.scrub.next_deadline())

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
                corrupt_count=tier.corrupt_count,
                scrubbed_bytes=tier.scrubbed_bytes,
                evicted_bytes=tier.evicted_bytes,
            )
            for tier in self.policy.tiers.values()
        )
        return Status(
            tiers=tiers,
            datasets=tuple(self.counters(name) for name in self.policy.datasets),
            undeclared=self.counters(UNDECLARED),
            fills=len(self.copies.filling),
            queued=len(self.readers.queue),
            plans=len(self.lookahead.plans),
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

    # Feeding the fills

    def _feed(self) -> None:
        """Start what can start, the most urgent first. What must wait keeps those behind it waiting."""
        self._moment.fed()
        self._more = bool(self.steps)
        self.policy.reopen(self._moment.now)
        if self.readers.feed() and self.claims.feed_refills():
            plans_done = self.lookahead.feed()
            prefetches_done = self.claims.feed_prefetch()
            self._more |= not (plans_done and prefetches_done)

    # The executor

    def _copy(self, extent: ExtentId, tier: TierName, phase: Phase) -> Copy:
        copy = self.copies.find(extent, self.policy.tiers[tier])
        assert copy is not None, f"no copy of {extent.hex()} in {tier}"
        assert copy.phase is phase, f"a copy that is {copy.phase.name}, not {phase.name}"
        return copy

    def _filled(self, event: ev.Filled) -> None:
        copy = self._copy(event.extent, event.tier, Phase.FILLING)
        self.copies.filled(copy, event.from_peer)
        self.readers.answer(copy.entry)
        self.copies.settle(copy)
        self.scrub.admit((event.extent,), event.tier)

    def _fill_failed(self, event: ev.FillFailed) -> None:
        copy = self._copy(event.extent, event.tier, Phase.FILLING)
        entry, promotion = copy.entry, copy.source is not None
        self.copies.drop(copy)
        if event.code in (OutOfSpace.code, TierFailed.code):
            self._place_again(entry, copy)
            return
        if entry.best() or entry.filling():
            self.copies.forget(entry)
            return
        if promotion and not entry.waiters:
            if entry.datasets:  # its origin went meanwhile, and this fill was taken for the repair
                self.copies.refills[entry.id] = None
            self.copies.forget(entry)
            return
        entry.attempts += 1
        if event.retry and entry.attempts < self.policy.settings.max_attempts:
            entry.due_at = self._moment.now + backoff_s(entry.attempts, entry.id)
            self.alarms.set(entry.due_at, entry.id)
            return
        entry.attempts, entry.failed = 0, True
        for dataset in entry.datasets:
            dataset.fail(entry.id, event.code, event.message)
        self.readers.fail(entry, event.code, event.message)
        self.copies.forget(entry)

    def _place_again(self, entry: Entry, copy: Copy) -> None:
        """The tier failed, not the source: what waits goes elsewhere or is refused, at once."""
        entry.avoid = copy.tier
        self.policy.full(copy.tier, self._moment.now)
        self.readers.want(entry)
        if entry.datasets:  # its waiters may be refused, and a prefetch wants it all the same
            self.copies.refills[entry.id] = None
        self.copies.forget(entry)

    def _committed(self, event: ev.Committed) -> None:
        copy = self.copies.find(event.extent, self.policy.tiers[event.tier])
        if copy:
            self.copies.committed(copy)
            self._moment.change()

    def _commit_failed(self, event: ev.CommitFailed) -> None:
        copy = self._copy(event.extent, event.tier, Phase.RESIDENT)
        entry = copy.entry
        entry.avoid = copy.tier
        self.copies.committed(copy)
        self._doom(copy)
        if entry.ready or entry.filling() or entry.id in self.copies.refills:
            return  # another tier has it, or takes it: this one was lost before
        for dataset in entry.datasets:
            dataset.fail(entry.id, TierFailed.code, event.message)

    def _corrupt(self, event: ev.Corrupt) -> None:
        copy = self.copies.find(event.extent, self.policy.tiers[event.tier])
        if copy and copy.phase is Phase.RESIDENT:
            copy.tier.corrupt_count += not copy.doomed
            self._doom(copy)
            if copy.tier.name != RAM:  # a file can go while it is open: its repair waits for no reader
                self.readers.detach(copy)
            if copy.entry.datasets:
                self.copies.refills[copy.entry.id] = None

    def _doom(self, copy: Copy) -> None:
        if copy.phase is Phase.RESIDENT and not copy.doomed:
            self.copies.doom(copy)
        self._moment.change()

    def _evicted(self, event: ev.Evicted) -> None:
        copy = self._copy(event.extent, event.tier, Phase.EVICTING)
        self.copies.drop(copy)
        self.readers.want(copy.entry)
        self.copies.forget(copy.entry)

    def _recovered(self, event: ev.Recovered) -> None:
        self.copies.found(self.policy.tiers[event.tier], event.extents)
        self.scrub.admit(event.extents, event.tier)

    def _resized(self, event: ev.Resized) -> None:
        self.policy.resize(self.policy.tiers[event.tier], event.budget_bytes)

    def _shrink(self, tier: Tier) -> None:
        """Evict what is too much for the budget, as far as nobody uses or pinned it: the kept last."""
        for copy in self.policy.overflow(tier):
            self.copies.evict(copy)

    def _verified(self, event: ev.Verified) -> None:
        size_bytes = self.scrub.done(event.extent, event.tier)
        if event.looked:
            self.policy.tiers[event.tier].scrubbed_bytes += size_bytes

    def _tier_lost(self, event: ev.TierLost) -> None:
        tier = self.policy.tiers[event.tier]
        tier.lost = True
        self.scrub.lost(tier.name)
        self.copies.rejudge(tier)
        self._retune_tier()
        for copy in [each for each in self.copies.filling if each.tier is tier]:
            self.readers.want(copy.entry)
            if copy.entry.datasets:  # a prefetch takes it elsewhere too: the answer may be long
                self.copies.refills[copy.entry.id] = None

    def _tier_back(self, event: ev.TierBack) -> None:
        tier = self.policy.tiers[event.tier]
        tier.lost = False
        self._retune_tier()
        for entry in tuple(self.copies.entries.values()):
            if entry.waiters and entry.ready:
                self.readers.answer(entry)
        self.copies.rejudge(tier)

    def _renewed(self, event: ev.Renewed) -> None:
        tier = self.policy.tiers[event.tier]
        for copy in self.copies.of(tier):
            if copy.leases:
                self.readers.detach(copy)
        self.copies.renew(tier, event.extents)
        self.scrub.admit(event.extents, event.tier)
        self.policy.retry(tier)

    def _retune_tier(self) -> None:
        self.policy.retune()
        for entry in self.copies.entries.values():
            was_ready = entry.ready
            self.copies.note(entry)
            if was_ready and not entry.ready and entry.datasets:
                self.copies.refills[entry.id] = None

    def _tick(self, _: ev.Tick) -> None:
        if place := self.scrub.next(self._moment.now):
            self._moment.tell(ev.Verify(*place))
        if self._more:
            self._moment.change()
        self.steps.advance()
        for extent in self.alarms.ring(self._moment.now):
            entry = self.copies.entries.get(extent)
            if entry is None or entry.due_at is None or entry.due_at > self._moment.now:
                continue
            entry.due_at = None
            self.copies.refills[extent] = None  # also beside waiters, who may leave or be refused
            if entry.waiters:
                self.readers.answer(entry)
            self.copies.forget(entry)
            self._moment.change()

    def _job_ended(self, event: ev.JobEnded) -> None:
        self.lookahead.end_job(event.job)
        self.claims.end_job(event.job)
