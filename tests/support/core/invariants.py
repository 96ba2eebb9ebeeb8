"""The invariants of a node, asserted from scratch against its running accounts."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import chain

from cachesvc.core.events import Event
from cachesvc.core.lookahead.plans import Plans
from cachesvc.core.model import RAM, ExtentId
from cachesvc.core.node.claims import Claims
from cachesvc.core.node.node import Node
from cachesvc.core.node.readers import ALL_USERS, Readers
from cachesvc.core.records.copy_phases import Phase
from cachesvc.core.records.residency import Ahead, CacheEntry, Copy, EvictionList, Role, TierState
from cachesvc.core.tiering.copies import Copies
from cachesvc.core.tiering.policy import SMALL_FILLS
from cachesvc.simulate.simulated_node import SimulatedNode
from cachesvc.simulate.simulation import Simulation


def check(node: Node) -> None:
    """Assert that every account agrees with what it counts. O(extents)."""
    copies, claims, readers, plans = node.copies, node.claims, node.readers, node.plans
    queued: defaultdict[ExtentId, set[int]] = defaultdict(set)
    for job, entry in chain(readers.queue, *readers.prepared.values()):
        assert job not in queued[entry.id], "queued twice for one job"
        queued[entry.id].add(job)
    for entry in copies.entries.values():
        assert entry.queued == queued.pop(entry.id, set()), "queue membership"
        _check_entry(entry, all(claims.settled(dataset.id) for dataset in entry.datasets))
    assert not queued, "queued without a record"
    for extent in copies.incomplete:
        assert copies.entries[extent].ready, "objects are missing in an extent that is not resident"
    for tier in copies.policy.tiers.values():
        _check_tier(copies, tier)
    _check_readers(copies, readers)
    _check_plans(copies, plans)
    _check_datasets(copies, claims)
    filling = {copy for copy in _all(copies) if copy.phase is Phase.FILLING}
    assert filling == copies.filling.keys(), "fills in flight"
    preparing = [copy.preparer for copy in filling if copy.preparer is not None]
    assert len(preparing) <= copies.policy.settings.preparing, "more prepared extents at once than slots"
    assert len(preparing) == len(set(preparing)), "two extents for one preparer"
    assert set(preparing) == copies.preparers.working, "preparers at work"
    shares, entries = copies.policy.shares, copies.entries.values()
    owned = sum(entry.size_bytes for entry in entries if entry.datasets and entry.owned)
    assert shares.owned_bytes == owned, "owned bytes"
    foreign = [c.entry.size_bytes for c in _all(copies) if c.role is Role.KEPT and not c.entry.owned]
    assert shares.foreign_kept_bytes == sum(foreign), "kept bytes of other owners"
    assert copies.peer_fills <= copies.policy.settings.max_fills, "more fills for peers than there may be"
    slots = [copy for copy in filling if not copy.for_peer and copy.preparer is None]
    settings, under_way = copies.policy.settings, sorted(copy.entry.size_bytes for copy in slots)
    if len(slots) > settings.max_fills:
        assert len(slots) <= SMALL_FILLS * settings.max_fills, "more fills than slots"
        assert sum(under_way[:-1]) < settings.fill_bytes, "more fills than slots, and they are not small"


def checked(simulation: Simulation, every: int) -> Simulation:
    """Check the nodes of a simulation after each so many events."""
    for node in simulation.nodes:
        _check_sends(node, every)
    return simulation


def _check_sends(node: SimulatedNode, every: int) -> None:
    send = node.send

    def sends(event: Event) -> None:
        send(event)
        if node.event_count % every == 0:
            check(node.core)

    node.send = sends  # type: ignore[method-assign]


def _all(copies: Copies) -> list[Copy]:
    return [copy for entry in copies.entries.values() for copy in entry.copies]


def _check_entry(entry: CacheEntry, settled: bool) -> None:
    tiers = [copy.tier.name for copy in entry.copies]
    assert len(set(tiers)) == len(tiers), "two copies in one tier"
    assert entry.ready == (entry.best() is not None), "readiness"
    if entry.waiters:
        assert not entry.ready, "a waiter on a resident extent"
        assert entry.filling() or entry.queued or entry.due_at is not None, (
            "a waiter whose extent is neither filling, queued nor due"
        )
    for copy in entry.copies:
        _check_copy(copy, settled)
    alive = entry.copies or entry.waiters or entry.datasets or entry.needs or entry.queued or entry.wanted_by
    assert all(each.datasets and each.made_from for each in entry.wanted_by), "wanted by what nobody claims"
    assert alive or entry.due_at is not None, "an entry that nothing refers to"


def _check_copy(copy: Copy, settled: bool) -> None:
    assert (copy.role is Role.KEPT) == (copy.home is not None), "kept copies have a home"
    assert copy.home is None or copy.home in copy.entry.datasets, "a home that claims the extent"
    assert min(copy.leases, copy.fills_from) >= 0, "counts below zero"
    if copy.phase is not Phase.RESIDENT:
        assert copy.leases + copy.fills_from == 0, "in use before filled or after evicted"
    if copy.source:
        assert copy.source.phase is Phase.RESIDENT, "a source that is not resident"
        assert copy.source.fills_from, "a source that is not protected"
    listed = copy.idle and not copy.to_evict and not copy.pinned
    assert settled or copy.eviction_list is None or (copy.idle and not copy.to_evict), (
        "on an eviction list though in use"
    )
    assert not settled or (copy.eviction_list is not None) == listed, (
        "on an eviction list exactly while evictable"
    )
    assert not (copy.idle and copy.to_evict) or copy.tier.lost, "an idle copy that should be evicted"


def _check_tier(copies: Copies, tier: TierState) -> None:
    mine = [copy for copy in _all(copies) if copy.tier is tier]
    sizes = {phase: sum(c.entry.size_bytes for c in mine if c.phase is phase) for phase in Phase}
    recorded = [extent for extent in tier.dormant if extent in copies.entries]
    assert not recorded, "dormant, and yet with an entry"
    assert tier.used_bytes == sum(sizes.values()) + tier.dormant.size_bytes, "used bytes"
    assert tier.evicting_bytes == sizes[Phase.EVICTING], "evicting bytes"
    assert tier.kept_bytes == sum(c.entry.size_bytes for c in mine if c.role is Role.KEPT), "kept bytes"
    assert min(tier.corrupt_count, tier.scrubbed_bytes) >= 0, "counts below zero"
    assert tier.held_bytes >= 0, "held bytes below zero"
    assert not tier.held_bytes or tier.name == RAM, "held bytes outside RAM"
    if tier.free_bytes < 0:
        # Only memory that readers hold, or extents that were recovered at the start, may exceed a budget or lie in a
        # lost tier.
        over = tier.used_bytes - tier.budget_bytes
        excused = tier.held_bytes or tier.lost or over <= tier.evicting_bytes or not tier.unused_bytes
        assert excused, "a budget exceeded"
    assert tier.committing == {c for c in mine if not c.committed}, "commits under way"
    lists: list[EvictionList] = [tier.lru, tier.lru_unplanned, tier.passing, tier.ahead, tier.in_use]
    lists.extend(tier.kept.values())
    on_lists = [copy for each in lists for copy in each]
    assert len(on_lists) == len(set(on_lists)), "on two eviction lists"
    assert set(on_lists) == {c for c in mine if c.eviction_list is not None}, "members of eviction lists"
    for each in lists:
        assert each.size_bytes == sum(copy.entry.size_bytes for copy in each), "bytes of an eviction list"
        assert all(copy.eviction_list is each for copy in each), "eviction list of a copy"
        assert [*reversed(each)] == [*each][::-1], "an eviction list whose links differ by direction"
        assert len(each) == len([*each]), "length of an eviction list"


def _check_readers(copies: Copies, readers: Readers) -> None:
    leases: Counter[Copy] = Counter()
    waiting: Counter[tuple[int, ExtentId]] = Counter()
    for number, reader in readers.readers.items():
        for leased in reader.leases.values():
            assert leased, "an extent without a lease"
            leases.update(leased)
        for extent, count in reader.waiting.items():
            waiting[(number, extent)] = count
    assert leases == Counter({copy: copy.leases for copy in _all(copies) if copy.leases}), "leases"
    entries = copies.entries.values()
    asked = Counter((reader, entry.id) for entry in entries for reader, _ in entry.waiters)
    assert waiting == asked, "waiters"
    ram = copies.policy.tiers.get(RAM)
    if ram:
        holds = [
            (extent, hold) for reader in readers.readers.values() for extent, hold in reader.held.items()
        ]
        held = {extent: hold.size_bytes for extent, hold in holds if hold.size_bytes}
        assert ram.held_bytes == sum(held.values()), "held by readers"
        of_users: Counter[int | None] = Counter({ALL_USERS: ram.held_bytes})
        for user, _, size_bytes in {(hold.user, extent, hold.size_bytes) for extent, hold in holds}:
            of_users[user] += size_bytes
        assert readers.holds.held_bytes == of_users, "held by each user"


def _check_plans(copies: Copies, plans: Plans) -> None:
    needs: Counter[ExtentId] = Counter()
    ahead: Counter[Ahead] = Counter()
    for plan in plans.ending:
        needs.update(plan.row(index)[0] for _, index, _ in plan.entered)
    for plan in plans.plans.values():
        needs.update(plan.row(index)[0] for _, index, _ in plan.entered)
        assert plan.entered_bytes == sum(size for _, _, size in plan.entered), "entered bytes"
        assert plan.number in plan.window.plans, "a plan that its window does not list"
        assert plan.behind or not plan.entered or plan.entered[0][0] >= plan.passed, (
            "a passed row that is still entered"
        )
        ahead[plan.window.ahead] = 0
    for copy in _all(copies):
        if copy.ahead_of is not None:
            assert not copy.leases, "leased, and yet ahead"
            assert copy in copy.ahead_of.copies, "ahead of a window that does not list it"
            ahead[copy.ahead_of] += copy.entry.size_bytes
    assert all(copy.ahead_of is each for each in ahead for copy in each.copies), "ahead of another window"
    assert all(each.size_bytes == size_bytes for each, size_bytes in ahead.items()), "bytes ahead"
    entries = copies.entries.values()
    assert needs == Counter({entry.id: entry.needs for entry in entries if entry.needs}), "needs"


def _check_datasets(copies: Copies, claims: Claims) -> None:
    claimed = [entry for entry in copies.entries.values() if entry.datasets]
    assert copies.policy.shares.claimed_bytes == sum(
        entry.size_bytes for entry in claimed if not entry.unread
    ), "claimed bytes"
    for dataset in copies.policy.shares.datasets.values():
        assert dataset.claimed or not claims.claimed(dataset.id), "a dataset without a claim"
        known = (copies.entries.get(extent) for extent, _ in dataset.extents)
        mine = [entry for entry in known if entry is not None and dataset in entry.datasets]
        assert len(mine) == len(dataset.extents) or not claims.claimed(dataset.id), "an extent not claimed"
        assert dataset.size_bytes == sum(entry.size_bytes for entry in mine), "bytes of a dataset"
        assert dataset.ready_count == sum(entry.ready for entry in mine), "resident extents"
        assert dataset.ready_bytes == sum(entry.size_bytes for entry in mine if entry.ready), "resident bytes"
        kept = (copy for entry in mine for copy in entry.copies if copy.home is dataset)
        assert dataset.kept_bytes == sum(copy.entry.size_bytes for copy in kept), "kept bytes of a dataset"
