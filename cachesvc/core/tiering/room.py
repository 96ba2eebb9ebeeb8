"""Room for an extent: which tier has it, and what is evicted to make it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

from cachesvc.core.records.residency import Copy, Role, TierState


@dataclass(frozen=True, slots=True)
class Placement:
    """A decision: reserve in `tier`; or evict `victims` first; or wait, for there is room `soon`; or none of these."""

    tier: TierState | None = None
    role: Role = Role.LRU
    victims: tuple[Copy, ...] = ()
    soon: bool = False

    @property
    def room_coming(self) -> bool:
        """There is room once evictions are done."""
        return self.soon or bool(self.victims)


NOWHERE = Placement()
SOON = Placement(soon=True)


def first(places: Iterable[Placement | None]) -> Placement | None:
    """The first placement that is not None."""
    return next(filter(None, places), None)


def free_room(tiers: Iterable[TierState], size_bytes: int, role: Role) -> Placement | None:
    """A placement in the first tier that has room without an eviction."""
    return next((Placement(tier, role) for tier in tiers if tier.free_bytes >= size_bytes), None)


def oldest(tier: TierState) -> float:
    """The time of the last use of the copy that a tier would evict first, in seconds; inf where it has none to evict."""
    if tier.dormant:
        return 0.0
    first = next(chain(tier.lru, tier.lru_unplanned, tier.passing), None)
    return first.used_at if first else float("inf")


def make_room(
    tier: TierState, size_bytes: int, candidates: Iterable[Copy] | None = None, unplanned: bool = False
) -> Placement | None:
    """Choose what to evict for `size_bytes` in a tier, beside what is being evicted: `SOON` where nothing more is needed,
    None where the candidates do not suffice. Default candidates: the tier's spare copies; all unused ones where
    `unplanned`."""
    short = size_bytes - tier.free_bytes - tier.evicting_bytes
    if short <= 0:
        return SOON
    if candidates is None:
        if short > (tier.unused_bytes if unplanned else tier.spare_bytes):
            return None
        candidates = tier.unused() if unplanned else tier.spare()
    victims, enough = take(candidates, short)
    return Placement(victims=victims) if enough else None


def take(candidates: Iterable[Copy], short_bytes: int) -> tuple[tuple[Copy, ...], bool]:
    """The first candidates that together hold `short_bytes`, and whether they suffice. No further candidate is taken from
    the iterator: some get their records only then."""
    victims: list[Copy] = []
    candidates = iter(candidates)
    while short_bytes > 0 and (copy := next(candidates, None)) is not None:
        victims.append(copy)
        short_bytes -= copy.entry.size_bytes
    return tuple(victims), short_bytes <= 0
