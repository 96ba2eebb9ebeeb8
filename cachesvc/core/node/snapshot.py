"""A node told as events, so that another daemon's core can go on where this one stops.

What the other must have been told before: its tiers (`Recovered`) and its readers' datasets (`DatasetDeclared`).
Fills under way are not told: whoever waits for one asks again.
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
    """(extent, size_bytes) of what may be granted from a tier: leased, then pinned, then kept, then by recent use, then
    what nobody has named since the start. A smaller budget takes as much from the front as it holds."""
    holder = node.policy.tiers[tier]
    usable = sorted((copy for copy in node.copies.copies_in(holder) if copy.usable), key=_worth, reverse=True)
    unnamed = () if holder.lost else holder.dormant.items()
    return [*((copy.entry.id, copy.entry.size_bytes) for copy in usable), *unnamed]


def _worth(copy: Copy) -> tuple[bool, bool, bool, float]:
    return copy.leases > 0, copy.pinned, copy.role is Role.KEPT, copy.used_at


def replay(node: Node, unsent: Iterable[Grant]) -> list[Event]:
    """Leases, holds, plans and demands, in the order in which they are to be told. `unsent` are the grants that
    their readers have not received: to the other daemon they are still demands."""
    grants = list(unsent)
    return [*_leases(node, grants), *_plans(node), *_demands(node, grants)]


def protecting_first(node: Node, told: Iterable[Event]) -> list[Event]:
    """The same events in the order for a node that has less room: leases of what is in it, then the rest, among it
    leases that only hold memory. Told before, those would have what is leased evicted."""
    return sorted(
        told, key=lambda each: not (isinstance(each, Leased) and node.where(each.extent) == each.tier)
    )


def _leases(node: Node, unsent: list[Grant]) -> Iterable[Event]:
    owed = Counter((grant.reader, grant.extent, grant.tier) for grant in unsent)
    for name, reader in node.readers.readers.items():
        for copy in (copy for leases in reader.leases.values() for copy in leases):
            key = (name, copy.entry.id, copy.tier.name)
            if owed[key]:
                owed[key] -= 1
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
        waiting = node.copies.entries.get(grant.extent)
        if waiting is not None:  # else its reader is gone, and so is the extent since
            size_bytes, job = waiting.size_bytes, _job(node, grant.reader)
            yield Demanded(grant.reader, grant.request, grant.extent, size_bytes=size_bytes, job=job)
    for entry in node.copies.entries.values():
        for reader, request in entry.waiters:
            yield Demanded(reader, request, entry.id, size_bytes=entry.size_bytes, job=_job(node, reader))


def _job(node: Node, name: ReaderId) -> int:
    """Whose turn a reader's demands take, as far as it is known; 0 of one that is gone."""
    reader = node.readers.readers.get(name)
    return reader.job if reader else 0
