"""What the executor answers to commands, and what is done where one failed: try again, fill elsewhere, or tell.

A failed fill is tried again after a pause, for its readers and for whoever else wants the extent. Where the tier
failed and not the source, the extent is placed again at once.
"""

from __future__ import annotations

from cachesvc.core import events as ev
from cachesvc.core.errors import OutOfSpace, TierFailed
from cachesvc.core.model import RAM, ExtentId, TierName
from cachesvc.core.node.prefetch import Prefetches
from cachesvc.core.node.readers import Readers
from cachesvc.core.node.retries import Alarms, backoff_s
from cachesvc.core.node.scrub import Scrub
from cachesvc.core.node.tier_outages import Outages
from cachesvc.core.records.cache_entry import CacheEntry, Copy
from cachesvc.core.records.copy_phases import Phase
from cachesvc.core.tiering.copies import Copies


class Completions:
    """The retries that are due, and what each answer changes."""

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
        self._alarms = Alarms()

    def filled(self, event: ev.Filled) -> None:
        """The bytes are there: whoever waits is granted them."""
        copy = self._copy(event.extent, event.tier, Phase.FILLING)
        entry = copy.entry
        entry.attempts, entry.failed, entry.avoid = 0, False, None
        self._copies.filled(copy, event.from_peer)
        self._copies.note_missing_objects(entry, event.code, event.message)
        self._readers.answer(entry)
        self._copies.settle(copy)
        self._scrub.admit((event.extent,), event.tier)

    def fill_failed(self, event: ev.FillFailed) -> None:
        """The bytes are free; whoever waits does so for a retry, another place or the bad news."""
        copy = self._copy(event.extent, event.tier, Phase.FILLING)
        entry, promotion = copy.entry, copy.source is not None
        self._copies.drop_failed(copy)
        if event.code in (OutOfSpace.code, TierFailed.code):
            self._place_again(entry, copy)
        elif entry.best() or entry.filling():
            self._copies.forget(entry)
        elif promotion and not entry.waiters:
            self._prefetches.refill(
                entry
            )  # its origin went meanwhile, and this fill was taken for the repair
            self._copies.forget(entry)
        else:
            self._try_again(entry, event)

    def _place_again(self, entry: CacheEntry, copy: Copy) -> None:
        """The tier failed, not the source: what waits goes elsewhere or is refused, at once."""
        entry.avoid = copy.tier
        if not copy.tier.stalled:
            self._outages.full(copy.tier)
        self._readers.want(entry)
        self._prefetches.refill(entry)  # its waiters may be refused, and a prefetch wants it all the same
        self._copies.forget(entry)

    def _try_again(self, entry: CacheEntry, event: ev.FillFailed) -> None:
        entry.attempts += 1
        if event.retry and entry.attempts < self._policy.settings.max_attempts:
            entry.due_at = self._context.now + backoff_s(entry.attempts, entry.id)
            self._alarms.set(entry.due_at, entry.id)
            return
        entry.attempts, entry.failed = 0, True
        for dataset in entry.datasets:
            dataset.fail(entry.id, event.code, event.message)
        self._readers.fail(entry, event.code, event.message)
        self._copies.forget(entry)

    def next_alarm(self) -> float:
        """When the next retry is due, in seconds; inf where none is."""
        return self._alarms.next()

    def ring(self) -> None:
        """See to the retries that are due."""
        now = self._context.now
        for extent in self._alarms.ring(now):
            entry = self._copies.entries.get(extent)
            if entry is None or entry.due_at is None or entry.due_at > now:
                continue
            entry.due_at = None
            self._prefetches.retry(entry)  # also beside waiters, who may leave or be refused
            if entry.waiters:
                self._readers.answer(entry)
            self._copies.forget(entry)
            self._context.mark_changed()

    def committed(self, event: ev.Committed) -> None:
        """A copy may be evicted from here on."""
        copy = self._copies.find(event.extent, self._policy.tiers[event.tier])
        if copy:
            self._copies.end_commit(copy)
            self._context.mark_changed()

    def commit_failed(self, event: ev.CommitFailed) -> None:
        """A copy goes once its readers gave it back. A tier that took no more has no room until it is tried again."""
        copy = self._copy(event.extent, event.tier, Phase.RESIDENT)
        entry = copy.entry
        entry.avoid = copy.tier
        self._copies.end_commit(copy)
        self._copies.doom(copy)
        self._readers.recall(copy)
        if event.code == OutOfSpace.code:
            self._outages.full(copy.tier)
        if entry.ready or entry.filling() or self._prefetches.awaits(entry):
            return  # another tier has it, or takes it: this one was lost before
        for dataset in entry.datasets:
            dataset.fail(entry.id, TierFailed.code, event.message)

    def corrupt(self, event: ev.Corrupt) -> None:
        """A copy is wrong: it is granted no more, and filled again."""
        copy = self._copies.find(event.extent, self._policy.tiers[event.tier])
        if copy and copy.phase is Phase.RESIDENT:
            copy.tier.corrupt_count += not copy.doomed
            self._give_up(copy)

    def fill_again(self, event: ev.FillAgain) -> None:
        """Stop granting a copy with holes and fill it again: what it lacks may be there by now."""
        copy = self._copies.find(event.extent, self._policy.tiers[event.tier])
        if copy and copy.phase is Phase.RESIDENT and not copy.doomed:
            self._give_up(copy)

    def _give_up(self, copy: Copy) -> None:
        self._copies.doom(copy)
        self._context.mark_changed()
        self._readers.recall(copy)
        if copy.tier.name != RAM:  # a file can go while it is open: its repair waits for no reader
            self._readers.detach(copy)
        self._prefetches.refill(copy.entry)

    def evicted(self, event: ev.Evicted) -> None:
        """The bytes are free."""
        copy = self._copy(event.extent, event.tier, Phase.EVICTING)
        self._copies.drop_evicted(copy)
        if copy.doomed:
            self._outages.gave_up(copy)
        self._readers.want(copy.entry)
        self._copies.forget(copy.entry)

    def _copy(self, extent: ExtentId, tier: TierName, phase: Phase) -> Copy:
        copy = self._copies.find(extent, self._policy.tiers[tier])
        assert copy is not None, f"no copy of {extent.hex()} in {tier}"
        assert copy.phase is phase, f"a copy that is {copy.phase.name}, not {phase.name}"
        return copy
