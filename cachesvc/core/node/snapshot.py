"""A node's state as events, so that another daemon's core can go on where this one stops.

The other core must have its tiers (`Recovered`) and its readers' datasets (`DatasetDeclared`) before. Fills under way are
left out: their waiters are demands again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from cachesvc.core.commands import Grant
from cachesvc.core.events import Demanded, Event, HoldReported, Leased, Planned
from cachesvc.core.model import ExtentId, ReaderId, TierName
from cachesvc.core.node.node import Node
from cachesvc.core.records.cache_entry import Copy, Role


def best_first(node: Node, tier: TierName) -> list[tuple[ExtentId, int]]:
    """(extent, size_bytes) of what may be granted from a tier: leased copies, then pinned, then kept, then by recent use,
    then dormant extents. A smaller budget takes from the front as much as it holds."""
    state = node.policy.tiers[tier]
    usable = sorted((copy for copy in node.copies.copies_in(state) if copy.usable), key=_rank, reverse=True)
    dormant = () if state.lost else state.dormant.items()
    return [*((copy.entry.id, copy.entry.size_bytes) for copy in usable), *dormant]


def _rank(copy: Copy) -> tuple[bool, bool, bool, float]:
    return copy.leases > 0, copy.pinned, copy.role is Role.KEPT, copy.used_at


def replay(node: Node, unsent: Iterable[Grant]) -> list[Event]:
    """Leases, holds, plans and demands, in the order in which the other core is to handle them. `unsent` are the grants
    that their readers have not received: they become demands again."""
    grants = list(unsent)
    return [*_leases(node, grants), *_plans(node), *_demands(node, grants)]


def protecting_first(node: Node, events: Iterable[Event]) -> list[Event]:
    """The same events in the order for a node that has less room: first leases of copies that it has, then the rest. Leases
    that only hold memory would otherwise evict copies that are leased."""
    return sorted(
        events, key=lambda each: not (isinstance(each, Leased) and node.where(each.extent) == each.tier)
    )


def _leases(node: Node, unsent: list[Grant]) -> Iterable[Event]:
    unsent_counts = Counter((grant.reader, grant.extent, grant.tier) for grant in unsent)
    for name, reader in node.readers.readers.items():
        for copy in (copy for leases in reader.leases.values() for copy in leases):
            key = (name, copy.entry.id, copy.tier.name)
            if unsent_counts[key]:
                unsent_counts[key] -= 1
            else:
                yield Leased(*key, copy.entry.size_bytes)
        for extent, hold in reader.held.items():
            yield HoldReported(name, extent, *hold)


def _plans(node: Node) -> Iterable[Event]:
    for plan in node.plans.plans.values():
        retention = plan.window.retention
        following = tuple(retention.following[:]) if retention is not None else ()
        yield Planned(plan.number, plan.job, plan.rows, following, plan.passed, plan.launch, plan.window.user)


def _demands(node: Node, unsent: list[Grant]) -> Iterable[Event]:
    for grant in unsent:
        entry = node.copies.entries.get(grant.extent)
        if entry is not None:  # else its reader is gone, and then the extent is forgotten
            size_bytes, job = entry.size_bytes, _job(node, grant.reader)
            yield Demanded(grant.reader, grant.request, grant.extent, size_bytes=size_bytes, job=job)
    for entry in node.copies.entries.values():
        for reader, request in entry.waiters:
            yield Demanded(reader, request, entry.id, size_bytes=entry.size_bytes, job=_job(node, reader))


def _job(node: Node, name: ReaderId) -> int:
    """The job of a reader; 0 for a reader that is gone."""
    reader = node.readers.readers.get(name)
    return reader.job if reader else 0
