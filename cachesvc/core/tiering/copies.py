"""The node's extents and their copies, with every account that must move when one of them does.

Each change of a copy (reserve, fill, lease, settle, evict, drop) is one method here, so that budgets,
shelves and the datasets' counts cannot disagree. Decisions are `policy.py`'s, answers to readers `core/node/readers.py`'s.
"""

from __future__ import annotations

from functools import partial

from cachesvc.core.events import Evict, StartFill
from cachesvc.core.model import RAM, DatasetId, ExtentId
from cachesvc.core.records.eviction_list import Shelf
from cachesvc.core.records.moment import Moment
from cachesvc.core.records.state import Copy, Dataset, Entry, Phase, Role, Tally, Tier, Window
from cachesvc.core.tiering.policy import SMALL_FILLS, Policy
from cachesvc.core.tiering.room import Place

UNDECLARED = DatasetId("")
"""The name under which reads that no job declared are counted."""


class Copies:
    """Entries by extent, and the fills in flight."""

    def __init__(self, policy: Policy, moment: Moment) -> None:
        self.policy = policy
        self.moment = moment
        self.entries: dict[ExtentId, Entry] = {}
        self.filling: dict[Copy, None] = {}
        """In the order in which their fills began: that of a set is no function of the events."""
        self._apart = Window()
        """Of no order: its first read is no hit all the same."""
        self.tallies: dict[DatasetId, Tally] = {}
        self.undeclared = self.tallies[UNDECLARED] = Tally()
        self.lacking: dict[ExtentId, tuple[int, str]] = {}
        """Why the first object is missing, for each resident extent that was filled without some."""
        self.cramped: dict[Dataset, Entry] = {}
        """Of each dataset the last extent that found no room to be kept in, or none at all."""
        self.again: dict[ExtentId, None] = {}
        """Extents that `core/node/prefetch.py` fills again, each once."""

    @property
    def busy(self) -> bool:
        """Whether no more fills may start."""
        settings, count = self.policy.settings, len(self.filling)
        if count < settings.max_fills:
            return False
        under_way = sum(copy.entry.size_bytes for copy in self.filling)
        return count >= SMALL_FILLS * settings.max_fills or under_way >= settings.fill_bytes

    def know(self, extent: ExtentId, size_bytes: int) -> Entry:
        """The entry of an extent, made where there is none."""
        entry = self.entry(extent)
        if entry is None:
            entry = self.entries[extent] = Entry(extent, size_bytes)
        return entry

    def entry(self, extent: ExtentId) -> Entry | None:
        """The entry of an extent, made where a tier brought it through a restart; None of one unknown."""
        entry = self.entries.get(extent)
        if entry is not None:
            return entry
        for tier in self.policy.tiers.values():
            size_bytes = tier.found.take(extent)
            if size_bytes is not None:
                return self._awaken(tier, extent, size_bytes).entry
        return None

    def tally(self, entry: Entry, job: int = 0) -> Tally:
        """Where this extent's fills are counted, and the reads of a job (a reader is one): with the dataset that the
        job claims it of."""
        home = entry.home(job)
        return home.tally if home else self.undeclared

    def forget(self, entry: Entry) -> None:
        """Drop the record of an extent that nothing refers to any more."""
        used = entry.copies or entry.waiters or entry.datasets or entry.needs or entry.queued
        if not used and entry.due_at is None:
            self.entries.pop(entry.id, None)

    def find(self, extent: ExtentId, tier: Tier) -> Copy | None:
        """The copy of an extent in a tier, in any phase."""
        entry = self.entry(extent)
        return next((copy for copy in entry.copies if copy.tier is tier), None) if entry else None

    def found(self, tier: Tier, extents: dict[ExtentId, int]) -> None:
        """What a tier brought through a restart. What has a record already, say since another tier that has it too is
        beyond its budget and gives it up, gets one here at once."""
        named = [extent for extent in extents if extent in self.entries] if self.entries else []
        if named:
            extents = {extent: size for extent, size in extents.items() if extent not in self.entries}
        tier.found.add(extents, partial(self._awaken, tier))
        tier.used_bytes += tier.found.size_bytes
        for extent in named:
            entry = self.entries[extent]
            tier.used_bytes += entry.size_bytes
            self._adopt(entry, tier)

    def of(self, tier: Tier) -> list[Copy]:
        """The copies in a tier that have a record, in any phase. O(extents)."""
        return [copy for entry in self.entries.values() for copy in entry.copies if copy.tier is tier]

    def renew(self, tier: Tier, extents: dict[ExtentId, int]) -> None:
        """A lost tier has another directory, with these extents: its copies are gone, evictions under way too."""
        for copy in self.of(tier):
            self._vanish(copy)
        tier.used_bytes -= tier.found.size_bytes
        tier.found.clear()
        self.found(tier, extents)

    def _vanish(self, copy: Copy) -> None:
        assert copy.tier.lost, "another directory under a tier in use"
        assert copy.idle or copy.phase is Phase.EVICTING, "a copy in use"
        self._unshelve(copy)
        self.drop(copy)
        self.forget(copy.entry)

    def _awaken(self, tier: Tier, extent: ExtentId, size_bytes: int) -> Copy:
        """Make the records of an extent that was just taken from those found in a tier."""
        entry = self.entries[extent] = Entry(extent, size_bytes)
        copy = self._adopt(entry, tier)
        for other in self.policy.tiers.values():
            if other.found.take(extent) is not None:
                self._adopt(entry, other)
        return copy

    def _adopt(self, entry: Entry, tier: Tier) -> Copy:
        copy = Copy(entry, tier, Phase.RESIDENT)
        entry.copies.append(copy)
        if len(entry.copies) == 1 and not entry.datasets and not entry.needs and not tier.lost:
            entry.ready = True  # what follows would do the same: a million extents wait
            tier.lru.add(copy, first=True)
            return copy
        self.note(entry)
        self.settle(copy, spent=True)
        return copy

    def carry_out(
        self, place: Place, entry: Entry, source: Copy | None = None, ahead_of: Window | None = None
    ) -> bool:
        """Evict what gives way to an extent, or start its fill; whether that started. `ahead_of`: the window that
        look-ahead fetches it for."""
        for victim in place.victims:
            self.evict(victim)
        if place.tier is not None:
            self._start(entry, place.tier, place.role, source, ahead_of)
        return place.tier is not None

    def _start(
        self, entry: Entry, tier: Tier, role: Role, source: Copy | None, ahead_of: Window | None
    ) -> None:
        """Reserve the bytes and start the fill."""
        assert entry.size_bytes <= tier.free_bytes, "a reservation beyond the budget"
        assert not tier.lost, "a reservation in a lost tier"
        copy = Copy(entry, tier, Phase.FILLING, source=source)
        entry.copies.append(copy)
        tier.used_bytes += entry.size_bytes
        self._set_role(copy, role)
        if ahead_of is not None:
            self._set_ahead(copy, ahead_of)
        if source:
            self._unshelve(source)
            source.fills_from += 1
        elif role is not Role.KEPT:
            self.no_room(entry)
        self.filling[copy] = None
        self.moment.tell(StartFill(entry.id, tier.name, source.tier.name if source else None))

    def no_room(self, entry: Entry) -> None:
        """An extent is not to be kept, or is to be read elsewhere, since others hold the room."""
        if entry.datasets:
            self.cramped[entry.datasets[0]] = entry

    def filled(self, copy: Copy, from_peer: bool = False) -> None:
        """The bytes are complete; in an NVMe tier their commit is now under way."""
        entry = copy.entry
        del self.filling[copy]
        copy.phase, copy.used_at = Phase.RESIDENT, self.moment.now
        copy.committed = copy.tier.name == RAM
        if not copy.committed:
            copy.tier.committing.add(copy)
        if copy.source is None:
            entry.from_peer = from_peer
        if copy.source is None and not from_peer:
            self.tally(entry).source_bytes += entry.size_bytes
            self.sourced(entry)
        self._end_source(copy)
        self.note(entry)

    def sourced(self, entry: Entry) -> None:
        """The source gave an extent's bytes, or a reader was sent there for them."""
        entry.sourced_at = self.moment.now

    def committed(self, copy: Copy) -> None:
        """No commit is under way any more."""
        copy.committed = True
        copy.tier.committing.discard(copy)
        self.settle(copy)

    def drop(self, copy: Copy) -> None:
        """The bytes are free: a fill failed, or an eviction is done."""
        entry, tier = copy.entry, copy.tier
        self.filling.pop(copy, None)
        entry.copies.remove(copy)
        tier.used_bytes -= entry.size_bytes
        if copy.phase is Phase.EVICTING:
            tier.evicting_bytes -= entry.size_bytes
            tier.evicted_bytes += entry.size_bytes
        self._set_role(copy, Role.LRU)
        self._not_ahead(copy)
        self._end_source(copy)

    def need(self, entry: Entry) -> None:
        """One more entry in a plan's window names an extent: that protects its copies."""
        entry.needs += 1
        if entry.needs == 1:
            for copy in tuple(entry.copies):
                self.settle(copy)

    def unneed(self, entry: Entry) -> None:
        """One less does; what none needs any more and somebody claims goes first."""
        entry.needs -= 1
        if not entry.needs:
            for copy in tuple(entry.copies):
                self._not_ahead(copy)
                self.settle(copy, spent=bool(entry.datasets))

    def lease(self, copy: Copy, unplanned: bool = False) -> None:
        """Begin a lease, `unplanned`: of a reader without a plan. From here on the copy cannot be evicted."""
        self._unshelve(copy)
        copy.leases += 1
        copy.touched, copy.unplanned = True, unplanned
        self._not_ahead(copy)

    def _not_ahead(self, copy: Copy) -> None:
        """Count a copy no more as fetched ahead: it was read, or is no longer needed."""
        if copy.ahead_of is not None:
            copy.ahead_of.ahead_bytes -= copy.entry.size_bytes
            del copy.ahead_of.ahead[copy]
            copy.ahead_of = None

    def _set_ahead(self, copy: Copy, window: Window) -> None:
        copy.ahead_of = window
        window.ahead_bytes += copy.entry.size_bytes
        window.ahead[copy] = None

    def give_way(self, window: Window) -> None:
        """Free the room of what an order has ahead: what is kept stays, and is ahead of nobody's plan."""
        for copy in tuple(window.ahead):
            if copy.role is Role.KEPT:
                self._not_ahead(copy)
                self._set_ahead(copy, self._apart)
            elif copy.idle:
                self.evict(copy)

    def unlease(self, copy: Copy) -> None:
        """End a lease; the last one makes the copy the youngest of its shelf."""
        copy.leases -= 1
        copy.used_at = self.moment.now
        if not copy.leases:
            self.settle(copy)

    def settle(self, copy: Copy, spent: bool = False) -> None:
        """Give a copy that nobody uses the role and the shelf that it deserves now.

        `spent`: a plan used it for the last time, so among the LRU copies it goes first.
        """
        self._unshelve(copy)
        if not copy.idle:
            return
        if copy.doomed:
            if not copy.tier.lost:
                self.evict(copy)
            return
        if copy.asked_back:
            copy.asked_back = False
            if not copy.tier.lost and not copy.pinned:
                self.evict(copy)
                return
        self._set_role(copy, self.policy.role(copy))
        shelf = self._shelf(copy)
        if shelf is not None:
            shelf.add(copy, first=spent and copy.role is Role.LRU)

    def evict(self, copy: Copy) -> None:
        """Ask for the bytes back; they are free when the executor says so."""
        assert copy.idle, "an eviction of a copy in use"
        assert not copy.tier.lost, "an eviction in a lost tier"
        self._unshelve(copy)
        self._set_role(copy, Role.LRU)
        self._not_ahead(copy)
        copy.phase = Phase.EVICTING
        copy.tier.evicting_bytes += copy.entry.size_bytes
        self.moment.tell(Evict(copy.entry.id, copy.tier.name))
        was_ready = copy.entry.ready
        self.note(copy.entry)
        if was_ready and not copy.entry.ready:
            self._lost_its_place(copy.entry)

    def _lost_its_place(self, entry: Entry) -> None:
        """Fill an extent of a prefetch again where another tier has room for it. It does not go back to the tier that it
        left: two prefetches that displace each other would never end."""
        if any(dataset.prefetched for dataset in entry.datasets) and self.policy.room_elsewhere(entry):
            self.again[entry.id] = None
        else:
            self.give_up(entry)

    def give_up(self, entry: Entry) -> None:
        """Count an extent as one that its prefetches cannot keep."""
        for dataset in entry.datasets:
            if dataset.prefetched and entry.id not in dataset.failed:
                dataset.stuck[entry.id] = entry.size_bytes

    def doom(self, copy: Copy) -> None:
        """Never grant this copy again, and drop it as soon as nobody uses it."""
        if not copy.doomed:
            copy.doomed = True
            self.note(copy.entry)
            self.settle(copy)

    def lacks(self, entry: Entry, code: int, message: str) -> None:
        """Note that objects are missing in what was filled, or (code 0) that none is."""
        self.lacking.pop(entry.id, None)
        if code and entry.ready:
            self.lacking[entry.id] = (code, message)

    def note(self, entry: Entry) -> None:
        """Bring the datasets' resident counts up to date."""
        ready = entry.best() is not None
        if ready == entry.ready:
            return
        entry.ready = ready
        if not ready:
            self.lacking.pop(entry.id, None)
        for dataset in entry.datasets:
            dataset.count(entry, 1 if ready else -1)
            if ready:
                dataset.failed.pop(entry.id, None)
                dataset.stuck.pop(entry.id, None)

    def _end_source(self, copy: Copy) -> None:
        source, copy.source = copy.source, None
        if source:
            source.fills_from -= 1
            self.settle(source)

    def _unshelve(self, copy: Copy) -> None:
        if copy.shelf is not None:
            copy.shelf.remove(copy)

    def _shelf(self, copy: Copy) -> Shelf | None:
        if copy.role is Role.LRU:
            return copy.tier.visited if copy.unplanned and copy.tier.unplanned_bytes else copy.tier.lru
        if copy.role is Role.AHEAD:
            return copy.tier.in_use if copy.touched else copy.tier.ahead
        assert copy.home is not None
        return None if copy.pinned else copy.tier.kept.setdefault(copy.home.id, Shelf())

    def _set_role(self, copy: Copy, role: Role) -> None:
        home = copy.entry.datasets[0] if role is Role.KEPT else None
        if copy.role is role and copy.home is home:
            return
        size = copy.entry.size_bytes
        if copy.home is not None:
            copy.tier.kept_bytes -= size
            copy.home.kept_bytes -= size
        if home is not None:
            copy.tier.kept_bytes += size
            home.kept_bytes += size
        copy.role, copy.home = role, home

    def resettle(self, entry: Entry) -> None:
        """Judge all copies of an extent anew after its claims changed."""
        for copy in tuple(entry.copies):
            gone = copy.home is not None and copy.home not in entry.datasets
            if gone or (copy.home is not None and self.policy.shares.beyond_quota(entry)):
                self._unshelve(copy)
                copy.unplanned = False  # what was kept for a job that ended flushes nobody's share
                self._set_role(copy, Role.LRU)
                if entry.datasets and self.policy.shares.within_quota(entry):
                    self._set_role(copy, Role.KEPT)
            self._judge(copy)

    def _judge(self, copy: Copy) -> None:
        """Give a copy the role that it deserves now, though readers may hold it for as long as they run."""
        if copy.shelf is not None and copy.role is self.policy.role(copy) is Role.LRU:
            return  # in its place by age
        if copy.leases and copy.usable:
            self._set_role(copy, self.policy.role(copy))
        self.settle(copy)

    def drop_shelves(self, dataset: Dataset) -> None:
        """Nothing is kept of a dataset any more."""
        for tier in self.policy.tiers.values():
            tier.kept.pop(dataset.id, None)

    def rejudge(self, tier: Tier) -> None:
        """Judge the copies of a tier that was lost, or is back. What is lost counts for no quota: it may be kept
        elsewhere. What is back is kept as far as there is room, and what is pinned in any case."""
        for copy in self.of(tier):
            if tier.lost:
                self._unshelve(copy)
                self._set_role(copy, Role.LRU)
            self._judge(copy)
            if copy.entry.pinned:
                self.keep(copy.entry)

    def keep(self, entry: Entry) -> None:
        """See that a usable copy of a pinned extent is kept whether or not there is room to keep, as far as quotas let."""
        copy = None if entry.kept or not self.policy.shares.within_quota(entry) else entry.best()
        if copy is not None:
            self._unshelve(copy)
            self._set_role(copy, Role.KEPT)
            self.settle(copy)
