"""The node's extents and their copies, with every account that changes when a copy does.

Each change of a copy (reserve, fill, lease, settle, evict, drop) is one method here, so that budgets, eviction lists and
the datasets' counts cannot disagree. `policy.py` decides where extents go; `core/node/readers.py` answers readers.
"""

from __future__ import annotations

from collections.abc import Mapping

from cachesvc.core.commands import Evict, Need, StartFill
from cachesvc.core.model import RAM, DatasetId, ExtentId, ReaderId
from cachesvc.core.records.copy_phases import TRANSITIONS, CopyEvent, Phase
from cachesvc.core.records.dataset_state import DatasetState, DemandCounts
from cachesvc.core.records.event_context import EventContext
from cachesvc.core.records.preparers import Preparers
from cachesvc.core.records.residency import Ahead, CacheEntry, Copy, EvictionList, Role, TierState
from cachesvc.core.tiering.admission import Admission
from cachesvc.core.tiering.policy import SMALL_FILLS, Policy
from cachesvc.core.tiering.room import Placement

UNDECLARED = DatasetId("")
"""The name under which reads that no job declared are counted."""


class Copies:
    """Entries by extent, and the fills in flight."""

    def __init__(self, policy: Policy, context: EventContext) -> None:
        self.policy = policy
        self.context = context
        self.preparers = Preparers(policy.settings.preparing)
        self._admission = Admission(policy.tiers)
        self.transitions: Mapping[tuple[Phase, CopyEvent], Phase] = TRANSITIONS
        self.entries: dict[ExtentId, CacheEntry] = {}
        self.filling: dict[Copy, None] = {}
        """A dictionary for its order, that in which fills began: the order of a set is no function of the events."""
        self._no_order = Ahead()
        """Copies that look-ahead filled for an order which gave up its room."""
        self.counts: dict[DatasetId, DemandCounts] = {}
        self.undeclared = self.counts[UNDECLARED] = DemandCounts()
        self.incomplete: dict[ExtentId, tuple[int, str]] = {}
        """Resident extents that were filled without some objects, and why the first one is missing: code, message."""
        self.short_of_room: dict[DatasetState, CacheEntry] = {}
        """The last extent of each dataset that found no room to be kept in, or no room at all."""
        self.refills: dict[ExtentId, None] = {}
        """Extents that `core/node/prefetch.py` fills again, each once."""

    @property
    def peer_fills(self) -> int:
        """The fills in flight that peers want; they take no slots."""
        return sum(copy.for_peer for copy in self.filling)

    @property
    def in_slots(self) -> list[Copy]:
        """The fills in flight that take slots. Those of preparers have slots of their own."""
        return [copy for copy in self.filling if not copy.for_peer and copy.preparer is None]

    @property
    def busy(self) -> bool:
        """True if no more fills may start."""
        settings, in_slots = self.policy.settings, self.in_slots
        if (count := len(in_slots)) < settings.max_fills:
            return False
        under_way = sum(copy.entry.size_bytes for copy in in_slots)
        return count >= SMALL_FILLS * settings.max_fills or under_way >= settings.fill_bytes

    def ensure_entry(self, extent: ExtentId, size_bytes: int) -> CacheEntry:
        """The entry of an extent, made where there is none."""
        entry = self.entry(extent)
        if entry is None:
            entry = self.entries[extent] = CacheEntry(extent, size_bytes)
        return entry

    def entry(self, extent: ExtentId) -> CacheEntry | None:
        """The entry of an extent, made where the extent is dormant in a tier; None for an unknown extent."""
        entry = self.entries.get(extent)
        if entry is not None:
            return entry
        for tier in self.policy.tiers.values():
            size_bytes = tier.dormant.take(extent)
            if size_bytes is not None:
                return self.activate(tier, extent, size_bytes).entry
        return None

    def counts_of(self, entry: CacheEntry, job: int = 0) -> DemandCounts:
        """The counts for an extent's fills and for the reads of a job (a reader is one): those of the dataset through which
        the job claims the extent."""
        home = entry.home(job)
        return home.counts if home else self.undeclared

    def forget(self, entry: CacheEntry) -> None:
        """Drop the entry of an extent that nothing refers to any more."""
        used = entry.copies or entry.waiters or entry.datasets or entry.needs or entry.queued
        if not used and not entry.wanted_by and entry.due_at is None:
            self.entries.pop(entry.id, None)

    def find(self, extent: ExtentId, tier: TierState) -> Copy | None:
        """The copy of an extent in a tier, in any phase."""
        entry = self.entry(extent)
        return next((copy for copy in entry.copies if copy.tier is tier), None) if entry else None

    def copies_in(self, tier: TierState) -> list[Copy]:
        """The copies in a tier that have records, in any phase. O(extents)."""
        return [copy for entry in self.entries.values() for copy in entry.copies if copy.tier is tier]

    def activate(self, tier: TierState, extent: ExtentId, size_bytes: int) -> Copy:
        """Make the records of an extent that was just taken from a tier's dormant ones."""
        entry = self.entries[extent] = CacheEntry(extent, size_bytes)
        copy = self.adopt(entry, tier)
        for other in self.policy.tiers.values():
            if other.dormant.take(extent) is not None:
                self.adopt(entry, other)
        return copy

    def adopt(self, entry: CacheEntry, tier: TierState) -> Copy:
        """Make the record of a copy that a tier brings along."""
        copy = Copy(entry, tier)
        self._move(copy, CopyEvent.RECOVERED)
        entry.copies.append(copy)
        if len(entry.copies) == 1 and not entry.datasets and not entry.needs and not tier.lost:
            entry.ready = True  # a shortcut for the general case below: there may be a million extents
            tier.lru.add(copy, first=True)
            return copy
        self.update_ready(entry)
        self.settle(copy, exhausted=True)
        return copy

    # Fills.

    def carry_out(
        self,
        placement: Placement,
        entry: CacheEntry,
        source: Copy | None = None,
        ahead_of: Ahead | None = None,
        preparer: ReaderId | None = None,
    ) -> bool:
        """Begin the evictions of a placement, or start the extent's fill; whether it started. `ahead_of`: what look-ahead
        fetched for the same order. `preparer` makes the bytes from `source`."""
        for victim in placement.victims:
            self.evict(victim)
        if placement.tier is not None:
            copy = Copy(entry, placement.tier, source=source, preparer=preparer)
            self._start_fill(copy, placement.role, ahead_of)
        return placement.tier is not None

    def _start_fill(self, copy: Copy, role: Role, ahead_of: Ahead | None) -> None:
        """Reserve the bytes and start the fill."""
        entry, tier, source = copy.entry, copy.tier, copy.source
        assert entry.size_bytes <= tier.free_bytes, "a reservation beyond the budget"
        assert not tier.lost, "a reservation in a lost tier"
        self._move(copy, CopyEvent.RESERVED)
        entry.copies.append(copy)
        tier.used_bytes += entry.size_bytes
        self.set_role(copy, role)
        if ahead_of is not None:
            ahead_of.add(copy)
        if source:
            self.unlist(source)
            source.fills_from += 1
        if role is not Role.KEPT and (source is None or copy.preparer is not None):
            self.note_short_of_room(entry)
        self.filling[copy] = None
        if copy.preparer is not None:
            self.preparers.begin(copy.preparer)
        origin = source.tier.name if source and copy.preparer is None else None
        need = Need.READER if entry.waiters else Need.NONE if ahead_of is None else Need.PLAN
        self.context.emit(StartFill(entry.id, tier.name, origin, copy.preparer, entry.learned_bytes, need))

    def note_short_of_room(self, entry: CacheEntry) -> None:
        """Note that an extent is not kept, or is read elsewhere, because others hold the room."""
        if entry.datasets:
            self.short_of_room[entry.datasets[0]] = entry

    def filled(self, copy: Copy, from_peer: bool = False) -> None:
        """End a fill whose bytes are complete. In an NVMe tier their commit is now under way."""
        entry = copy.entry
        del self.filling[copy]
        self._move(copy, CopyEvent.FILLED)
        copy.used_at = self.context.now
        copy.committed = copy.tier.name == RAM
        if not copy.committed:
            copy.tier.committing.add(copy)
        if copy.preparer is not None:
            self.note_sourced(entry)
        elif copy.source is None:
            entry.from_peer = from_peer
            if not from_peer:
                self.counts_of(entry).source_bytes += entry.size_bytes
                self.note_sourced(entry)
        self.end_source(copy)
        self.update_ready(entry)

    def resize(self, entry: CacheEntry, size_bytes: int) -> None:
        """Give an uneven extent another size, and its copies with it."""
        by, entry.size_bytes = size_bytes - entry.size_bytes, size_bytes
        self.policy.shares.resize(entry, by)
        for copy in entry.copies:
            copy.tier.used_bytes += by
            copy.tier.kept_bytes += by * (copy.home is not None)
            copy.tier.evicting_bytes += by * (copy.phase is Phase.EVICTING)
            for group in (copy.eviction_list, copy.ahead_of):
                if group is not None:
                    group.size_bytes += by
        if by:
            self.context.mark_changed()

    def note_sourced(self, entry: CacheEntry) -> None:
        """Note that the source gave an extent's bytes now, or that a reader was sent there for them."""
        entry.sourced_at = self.context.now

    def note_missing_objects(self, entry: CacheEntry, code: int, message: str) -> None:
        """Note that a fill left out missing objects, or (code 0) that it is complete."""
        self.incomplete.pop(entry.id, None)
        if code and entry.ready:
            self.incomplete[entry.id] = (code, message)

    def end_commit(self, copy: Copy) -> None:
        """Note that no commit of a copy is under way any more."""
        copy.committed = True
        copy.tier.committing.discard(copy)
        self.settle(copy)

    def drop_failed(self, copy: Copy) -> None:
        """Free the bytes of a fill that failed."""
        self._drop(copy, CopyEvent.FILL_FAILED)

    def drop_evicted(self, copy: Copy) -> None:
        """Free the bytes of an eviction that is done."""
        self._drop(copy, CopyEvent.EVICTED)

    def drop_with_directory(self, copy: Copy) -> None:
        """Forget a copy of a lost tier that has another directory now, also where its eviction is under way."""
        assert copy.tier.lost, "a new directory for a tier in use"
        assert copy.idle or copy.phase is Phase.EVICTING, "a copy in use"
        self.unlist(copy)
        self._drop(copy, CopyEvent.DIRECTORY_REPLACED)
        self.forget(copy.entry)

    def _drop(self, copy: Copy, event: CopyEvent) -> None:
        entry, tier = copy.entry, copy.tier
        self.filling.pop(copy, None)
        entry.copies.remove(copy)
        tier.used_bytes -= entry.size_bytes
        if copy.phase is Phase.EVICTING:
            tier.evicting_bytes -= entry.size_bytes
            tier.evicted_bytes += entry.size_bytes
        self._move(copy, event)
        self.set_role(copy, Role.LRU)
        self._unset_ahead(copy)
        self.end_source(copy)

    def end_source(self, copy: Copy) -> None:
        """Stop protecting the copy that a fill reads, and note that its preparer is idle again once it has ended."""
        if copy.preparer is not None and copy not in self.filling:
            self.preparers.end(copy.preparer)
            copy.preparer = None
        source, copy.source = copy.source, None
        if source:
            source.fills_from -= 1
            self.settle(source)

    def _move(self, copy: Copy, event: CopyEvent) -> None:
        """Move a copy to its next phase. The only place that sets it."""
        following = self.transitions.get((copy.phase, event))
        assert following is not None, f"{event.name} of a copy that is {copy.phase.name}"
        copy.phase = following

    def lease(self, copy: Copy, unplanned: bool = False) -> None:
        """Begin a lease, after which the copy cannot be evicted. `unplanned`: by a reader without a plan."""
        self._move(copy, CopyEvent.LEASED)
        if not copy.entry.datasets:
            self._admission.read(copy)
        self.unlist(copy)
        copy.leases += 1
        copy.touched, copy.unplanned = True, unplanned
        self._unset_ahead(copy)

    def end_lease(self, copy: Copy) -> None:
        """End a lease; the last one makes the copy the youngest on its eviction list."""
        self._move(copy, CopyEvent.LEASE_ENDED)
        copy.leases -= 1
        copy.used_at = self.context.now
        if not copy.leases:
            self.settle(copy)

    def need(self, entry: CacheEntry) -> None:
        """Count one more entered plan row that names an extent: that protects its copies."""
        entry.needs += 1
        if entry.needs == 1:
            for copy in tuple(entry.copies):
                self.settle(copy)

    def end_need(self, entry: CacheEntry) -> None:
        """Count one row less. A claimed extent that no row needs any more is evicted first."""
        entry.needs -= 1
        if not entry.needs:
            for copy in tuple(entry.copies):
                self._unset_ahead(copy)
                self.settle(copy, exhausted=bool(entry.datasets))

    def _unset_ahead(self, copy: Copy) -> None:
        """Stop counting a copy as fetched ahead: it was read, or is no longer needed."""
        if copy.ahead_of is not None:
            copy.ahead_of.remove(copy)

    def free_ahead(self, ahead: Ahead) -> None:
        """Free the room of what an order has fetched ahead. Kept copies stay, and count for no order."""
        for copy in tuple(ahead.copies):
            if copy.role is Role.KEPT:
                ahead.remove(copy)
                self._no_order.add(copy)
            elif copy.idle:
                self.evict(copy)

    # Eviction.

    def settle(self, copy: Copy, exhausted: bool = False) -> None:
        """Give an idle copy its role and its eviction list, or evict it if it is `to_evict` or recalled.

        `exhausted`: a plan used it for the last time, so it is the first of the LRU copies to be evicted.
        """
        self.unlist(copy)
        if not copy.idle:
            return
        if copy.to_evict:
            if not copy.tier.lost:
                self.evict(copy)
            return
        if copy.recalled:
            copy.recalled = False
            if not copy.tier.lost and not copy.pinned:
                self.evict(copy)
                return
        self.set_role(copy, self.policy.role(copy))
        eviction_list = self._list_for(copy)
        if eviction_list is not None:
            eviction_list.add(copy, first=exhausted and copy.role is Role.LRU)
            if eviction_list is copy.tier.passing:
                self._admission.end_passing(copy.tier)

    def evict(self, copy: Copy) -> None:
        """Begin an eviction. The bytes are free when the executor says so."""
        assert copy.idle, "an eviction of a copy in use"
        assert not copy.tier.lost, "an eviction in a lost tier"
        self.unlist(copy)
        self.set_role(copy, Role.LRU)
        self._unset_ahead(copy)
        self._move(copy, CopyEvent.EVICTION_BEGUN)
        copy.tier.evicting_bytes += copy.entry.size_bytes
        self.context.emit(Evict(copy.entry.id, copy.tier.name))
        was_ready = copy.entry.ready
        self.update_ready(copy.entry)
        if was_ready and not copy.entry.ready:
            self._refill_elsewhere(copy.entry)

    def _refill_elsewhere(self, entry: CacheEntry) -> None:
        """Fill an evicted extent of a prefetch again where another tier has room for it. It does not go back to the tier
        that it left: two prefetches that displace each other would never end."""
        if any(dataset.prefetched for dataset in entry.datasets) and self.policy.room_elsewhere(entry):
            self.refills[entry.id] = None
        else:
            self.note_stuck(entry)

    def note_stuck(self, entry: CacheEntry) -> None:
        """Count an extent as one that its prefetches cannot keep."""
        for dataset in entry.datasets:
            if dataset.prefetched and entry.id not in dataset.failed:
                dataset.stuck[entry.id] = entry.size_bytes

    def doom(self, copy: Copy) -> None:
        """Never grant this copy again, and evict it as soon as it is idle."""
        if not copy.to_evict:
            self._move(copy, CopyEvent.EVICTION_DUE)
            copy.to_evict = True
            self.update_ready(copy.entry)
            self.settle(copy)

    def update_ready(self, entry: CacheEntry) -> None:
        """Bring the datasets' resident counts up to date."""
        ready = entry.best() is not None
        if ready == entry.ready:
            return
        entry.ready = ready
        if not ready:
            self.incomplete.pop(entry.id, None)
        for dataset in entry.datasets:
            dataset.count_ready(entry.size_bytes, 1 if ready else -1)
            if ready:
                dataset.failed.pop(entry.id, None)
                dataset.stuck.pop(entry.id, None)

    # Roles and eviction lists.

    def set_role(self, copy: Copy, role: Role) -> None:
        """Set a copy's role; KEPT charges it to the dataset that claimed its extent first."""
        home = copy.entry.datasets[0] if role is Role.KEPT else None
        if copy.role is role and copy.home is home:
            return
        size, foreign = copy.entry.size_bytes, copy.entry.size_bytes * (not copy.entry.owned)
        for charged, by in ((copy.home, -1), (home, 1)):
            if charged is not None:
                copy.tier.kept_bytes += by * size
                charged.kept_bytes += by * size
                self.policy.shares.foreign_kept_bytes += by * foreign
        copy.role, copy.home = role, home

    def unlist(self, copy: Copy) -> None:
        """Take a copy off its eviction list, if it is on one."""
        if copy.eviction_list is not None:
            copy.eviction_list.remove(copy)

    def _list_for(self, copy: Copy) -> EvictionList | None:
        tier = copy.tier
        if copy.role is Role.LRU:
            return tier.passing if copy.passing and not copy.entry.datasets else tier.lru_of(copy)
        if copy.role is Role.AHEAD:
            return tier.in_use if copy.touched else tier.ahead
        assert copy.home is not None
        return None if copy.pinned else tier.kept.setdefault(copy.home.id, EvictionList())
