"""Handles what the executor answers to commands. Where a command failed: try again, fill elsewhere, or tell the readers.

A failed fill is retried after a pause, for its waiters and for plans and prefetches that want the extent. Where the tier
failed and not the source, the extent is placed again at once.
"""

from __future__ import annotations

import heapq
import math

from cachesvc.core import events as ev
from cachesvc.core.errors import OutOfSpace, TierFailed
from cachesvc.core.limits import FILL_RETRY_CAP_S, FILL_RETRY_FIRST_S
from cachesvc.core.model import RAM, ExtentId, TierName
from cachesvc.core.node.prefetch import Prefetches
from cachesvc.core.node.readers import Readers
from cachesvc.core.node.scrub import Scrub
from cachesvc.core.node.tier_outages import Outages
from cachesvc.core.rates.backoff import backoff_s
from cachesvc.core.records.copy_phases import Phase
from cachesvc.core.records.residency import CacheEntry, Copy, Elsewhere
from cachesvc.core.tiering.copies import Copies


class Completions:
    """Applies each answer, and holds the retries that are due."""

    def __init__(
        self, copies: Copies, readers: Readers, prefetches: Prefetches, scrub: Scrub, outages: Outages
    ) -> None:
        self._copies = copies
        self._policy = copies.policy
        self._context = copies.context
        self._readers = readers
        self._prefetches = prefetches
        self._scrub = scrub
        self._outages = outages
        self._due: list[tuple[float, ExtentId]] = []
        """Heap of the times at which fills are retried; stale ones are ignored."""

    def filled(self, event: ev.Filled) -> None:
        """End a fill that succeeded, and grant the extent to its waiters."""
        copy = self._copy(event.extent, event.tier, Phase.FILLING)
        entry = copy.entry
        entry.attempts, entry.failed, entry.avoid = 0, False, None
        entry.wanted_by.clear()
        entry.elsewhere = Elsewhere.UNKNOWN
        if event.size_bytes and entry.most_bytes:
            self._copies.resize(entry, event.size_bytes)
        self._copies.filled(copy, event.from_peer)
        self._copies.note_missing_objects(entry, event.code, event.message)
        self._readers.answer_waiters(entry)
        self._copies.settle(copy)
        self._scrub.admit((event.extent,), event.tier)

    def fill_failed(self, event: ev.FillFailed) -> None:
        """End a fill that failed. Its waiters wait for a retry or a fill elsewhere, or get `Fail`."""
        copy = self._copy(event.extent, event.tier, Phase.FILLING)
        entry, promotion = copy.entry, copy.source is not None and copy.preparer is None
        self._copies.drop_failed(copy)
        if entry.most_bytes and not entry.copies:  # it may have been made larger this time than before
            self._copies.resize(entry, entry.most_bytes)
        if event.code in (OutOfSpace.code, TierFailed.code):
            self._place_again(entry, copy)
        elif entry.best() or entry.filling():
            self._copies.forget(entry)
        elif promotion and not entry.waiters:
            # the copy that it was filled from is gone meanwhile, and this fill was taken for its repair
            self._prefetches.refill(entry)
            self._copies.forget(entry)
        elif entry.elsewhere is Elsewhere.YES:  # it is prepared here
            entry.elsewhere = Elsewhere.NO
            self._readers.ensure_fill(entry)
            self._prefetches.refill(entry)
            self._copies.forget(entry)
        else:
            self._try_again(entry, event)

    def _place_again(self, entry: CacheEntry, copy: Copy) -> None:
        """Place an extent anew at once, or refuse its waiters: the tier failed, not the source."""
        entry.avoid = copy.tier
        if not copy.tier.stalled:
            self._outages.full(copy.tier)
        self._readers.ensure_fill(entry)
        self._prefetches.refill(entry)  # its waiters may be refused while a prefetch still wants it
        self._copies.forget(entry)

    def _try_again(self, entry: CacheEntry, event: ev.FillFailed) -> None:
        entry.attempts += 1
        if event.retry and entry.attempts < self._policy.settings.max_attempts:
            entry.due_at = self._context.now + fill_backoff_s(entry.attempts, entry.id)
            heapq.heappush(self._due, (entry.due_at, entry.id))
            return
        self._give_up(entry, event)
        made, entry.wanted_by = entry.wanted_by, []
        for each in made:
            self._give_up(each, event)
        self._copies.forget(entry)

    def _give_up(self, entry: CacheEntry, event: ev.FillFailed) -> None:
        """Tell the readers of an extent why it cannot be filled. Those of a prepared extent prepare for themselves."""
        entry.attempts, entry.failed = 0, True
        for dataset in entry.datasets:
            dataset.fail(entry.id, event.code, event.message)
        if entry.made_from is None:
            self._readers.fail_waiters(entry, event.code, event.message)
        else:
            self._readers.refuse(entry)
        self._copies.forget(entry)

    def next_alarm(self) -> float:
        """The time of the next retry, in seconds; inf where none is."""
        return self._due[0][0] if self._due else math.inf

    def ring(self) -> None:
        """Retry the fills that are due."""
        now = self._context.now
        while self._due and self._due[0][0] <= now:
            entry = self._copies.entries.get(heapq.heappop(self._due)[1])
            if entry is None or entry.due_at is None or entry.due_at > now:
                continue
            entry.due_at = None
            self._prefetches.retry(entry)  # beside waiters too: they may leave or be refused
            if entry.waiters:
                self._readers.answer_waiters(entry)
            self._copies.forget(entry)
            self._context.mark_changed()

    def committed(self, event: ev.Committed) -> None:
        """End a commit that succeeded: from here on the copy may be evicted."""
        copy = self._copies.find(event.extent, self._policy.tiers[event.tier])
        if copy:
            self._copies.end_commit(copy)
            self._context.mark_changed()

    def commit_failed(self, event: ev.CommitFailed) -> None:
        """End a commit that failed: evict the copy once its leases end. A tier that took no more bytes is full for a
        while."""
        copy = self._copy(event.extent, event.tier, Phase.RESIDENT)
        entry = copy.entry
        entry.avoid = copy.tier
        self._copies.doom(copy)  # first: a recalled copy is evicted as soon as its commit has ended
        self._copies.end_commit(copy)
        self._readers.recall(copy)
        if event.code == OutOfSpace.code:
            self._outages.full(copy.tier)
        if entry.ready or entry.filling() or self._prefetches.will_refill(entry):
            return  # another tier has the extent, or fills it
        for dataset in entry.datasets:
            dataset.fail(entry.id, TierFailed.code, event.message)

    def corrupt(self, event: ev.Corrupt) -> None:
        """Stop granting a copy whose bytes are wrong, and fill its extent again."""
        copy = self._copies.find(event.extent, self._policy.tiers[event.tier])
        if copy and copy.phase is Phase.RESIDENT:
            copy.tier.corrupt_count += not copy.to_evict
            self._replace(copy)

    def fill_again(self, event: ev.FillAgain) -> None:
        """Stop granting a copy with holes, and fill its extent again: the missing objects may be there by now."""
        copy = self._copies.find(event.extent, self._policy.tiers[event.tier])
        if copy and copy.phase is Phase.RESIDENT and not copy.to_evict:
            self._replace(copy)

    def _replace(self, copy: Copy) -> None:
        self._copies.doom(copy)
        self._context.mark_changed()
        self._readers.recall(copy)
        if copy.tier.name != RAM:  # an open file can be unlinked, so its repair waits for no reader
            self._readers.end_leases(copy)
        self._prefetches.refill(copy.entry)

    def evicted(self, event: ev.Evicted) -> None:
        """End an eviction: its bytes are free."""
        copy = self._copy(event.extent, event.tier, Phase.EVICTING)
        self._copies.drop_evicted(copy)
        if copy.to_evict:
            self._outages.shrink_full(copy)
        self._readers.ensure_fill(copy.entry)
        self._copies.forget(copy.entry)

    def _copy(self, extent: ExtentId, tier: TierName, phase: Phase) -> Copy:
        copy = self._copies.find(extent, self._policy.tiers[tier])
        assert copy is not None, f"no copy of {extent.hex()} in {tier}"
        assert copy.phase is phase, f"a copy that is {copy.phase.name}, not {phase.name}"
        return copy


def fill_backoff_s(attempt: int, extent: ExtentId) -> float:
    """Seconds to wait after failed attempt number `attempt` (1 is the first).

    Doubles up to a cap, times a factor in [1/2, 1) that depends on the extent's id. So retries of many extents are
    spread out, and the same events give the same trace.
    """
    whole = backoff_s(attempt - 1, FILL_RETRY_FIRST_S, FILL_RETRY_CAP_S)
    return whole * (0.5 + int.from_bytes(extent[-2:], "little") / 131072)
