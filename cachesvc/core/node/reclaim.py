"""Room that only readers could free is asked back from them.

What a reader holds is not evicted, and a reader maps what is kept for as long as it runs. So a dataset that came later
would never get its share: it streams, or is refused. Its extents that found no room say so (`Copies.cramped`), and once a
second some of what would give way, did nobody hold it, is asked for (`Recall`). Whoever reads it after that holds it for
one read, and it is evicted when nobody does. A tier beyond its budget asks likewise: memory that readers map cannot be
taken from them. What they hold from before our restart is in nobody's share, and goes first.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from itertools import chain, islice

from cachesvc.core.model import RAM, ExtentId
from cachesvc.core.node.readers import Readers
from cachesvc.core.records.cache_entry import CacheEntry, Copy, Role
from cachesvc.core.records.dataset_state import DatasetState
from cachesvc.core.records.tier_state import TierState
from cachesvc.core.tiering.budgets import answering
from cachesvc.core.tiering.copies import Copies
from cachesvc.core.tiering.policy import Requester
from cachesvc.core.tiering.room import NOWHERE

EVERY_S = 1.0
"""Readers at rest look no more often."""
OWED_S = 5.0
"""What was not given back by then may never be (views of it are out), so other room is asked for."""
MOST = 64
"""Extents in one go: a reader's buffer holds 333 messages."""
UNHEARD = 128
"""Recalls without any release after which a reader is asked for no more: a process that is stopped would fill its buffer,
and be taken for dead, while it goes on to map what it has."""
MESSAGES = 16_384
"""Readers that are looked at to tell them of all these: 2 ms."""
LOOKS = 4096
"""Leases looked at for one extent: 1 ms."""
EXTENTS = 4
"""For which that is done in one go, of four datasets; the others' come again."""


class Reclaim:
    """What was asked for and is still held."""

    def __init__(self, copies: Copies, readers: Readers) -> None:
        self._copies, self._readers = copies, readers
        self._policy, self._context = copies.policy, copies.context
        self._asked_at = -math.inf
        self._again_at = math.inf
        self._owed: dict[Copy | ExtentId, float] = {}
        """When each was asked for: copies, and extents that are held from before our restart."""
        self._turn = 0

    def next_deadline(self) -> float:
        """When to ask again for a tier beyond its budget; inf where there is none. Who looks for room comes by itself."""
        return self._again_at

    def feed(self) -> None:
        """Ask for room where extents found none, or a tier has less than none."""
        now, cramped, shares = self._context.now, self._copies.short_of_room, self._policy.shares
        beyond, self._again_at = self._beyond(), math.inf
        if not (beyond or cramped or shares.below_share):
            return
        if now < self._asked_at + EVERY_S:
            self._again_at = self._asked_at + EVERY_S if beyond else math.inf
            return
        self._asked_at, self._turn, self._copies.short_of_room = now, self._turn + 1, {}
        self._owed = {each: at for each, at in self._owed.items() if self._is_held(each)}
        spare = shares.spare_bytes()
        found = [(home, entry) for home, entry in cramped.items() if home in entry.datasets]
        shares.below_share = {
            home for home, entry in found if self._lack(entry, spare[home]) >= entry.size_bytes
        }
        most = max(1, min(MOST, MESSAGES // max(1, len(self._readers.readers))))
        for_others = (self._for(entry, spare[home]) for home, entry in found[:EXTENTS])
        for each in islice(chain(self._for_itself(beyond), *for_others), most):
            self._owed[each] = now
            if isinstance(each, Copy):
                each.recalled = True
                self._readers.recall(each, wrong=False)
            else:
                self._readers.recall_hold(each)
        if beyond and any(now < at + OWED_S for at in self._owed.values()):
            self._again_at = now + EVERY_S

    def _is_held(self, asked: Copy | ExtentId) -> bool:
        if isinstance(asked, Copy):
            return asked.recalled and asked.leases > 0
        return asked in self._readers.holds.sizes

    def _beyond(self) -> dict[TierState, float]:
        """By how much tiers hold more than their budgets, beside what is being evicted."""
        over = {tier: -tier.free_bytes - tier.evicting_bytes for tier in answering(self._policy.tiers)}
        return {tier: size_bytes for tier, size_bytes in over.items() if size_bytes > 0}

    def _for_itself(self, beyond: dict[TierState, float]) -> Iterator[Copy | ExtentId]:
        """What tiers have too much, whose share it may be."""
        spare: dict[DatasetState, float] = defaultdict(lambda: math.inf)
        if beyond:
            yield from self._chosen(beyond, 1, sum(beyond.values()), spare)

    def _lack(self, entry: CacheEntry, spare_bytes: float) -> float:
        """Bytes that an extent's dataset may keep and does not, by its share."""
        return max(0.0, -spare_bytes) if self._policy.shares.within_quota(entry) else 0.0

    def _for(self, entry: CacheEntry, spare_bytes: float) -> Iterator[Copy | ExtentId]:
        """As much as is kept beyond the room for it, and as this extent's dataset lacks of its own share; where the extent
        has no room at all, as much as the window, and what streams too."""
        size, lack = entry.size_bytes, self._lack(entry, spare_bytes)
        tiers = [
            tier
            for tier in answering(self._policy.tiers)
            if size <= tier.budget_bytes and not tier.full_until
        ]
        wanted = {tier: lack + max(0, tier.kept_bytes - tier.keep_bytes) for tier in tiers}
        refused = not entry.copies and self._policy.place(entry, Requester.PLANNED_READER) == NOWHERE
        window = self._policy.reserve
        if refused and window.tier in wanted:
            wanted[window.tier] = max(wanted[window.tier], window.window_bytes)
        spare = self._policy.shares.spare_bytes()
        yield from self._chosen(wanted, size, size if refused else 0, spare, entry.datasets[0])

    def _chosen(
        self,
        wanted: dict[TierState, float],
        least_bytes: int,
        anywhere: float,
        spare: dict[DatasetState, float],
        asks: DatasetState | None = None,
    ) -> Iterator[Copy | ExtentId]:
        """So many bytes of tiers, `least_bytes` of one at least, beside what was asked for lately: of what is in nobody's
        share, and of what is kept of datasets that have so much to spare. And so many `anywhere`, be it what streams, or
        what the dataset that `asks` might keep."""
        for each in (each for each, at in self._owed.items() if self._context.now < at + OWED_S):
            tier, size, home = self._whose(each)
            anywhere -= size
            if tier in wanted:
                wanted[tier] -= size
            if home is not None:
                spare[home] -= size
        if anywhere <= 0 and max(wanted.values(), default=0.0) < least_bytes:
            return
        for each in self._candidates():
            tier, size, home = self._whose(each)
            if tier not in wanted or each in self._owed:
                continue
            comes = isinstance(each, Copy) and (each.role is Role.AHEAD or _may_be_of(each, asks))
            due = not comes and wanted[tier] >= least_bytes and (home is None or spare[home] >= size)
            if due or (anywhere > 0 and home is None):
                anywhere -= size
                wanted[tier] -= size
                if home is not None:
                    spare[home] -= size
                yield each

    def _whose(self, asked: Copy | ExtentId) -> tuple[TierState, int, DatasetState | None]:
        """Where it is, its size in bytes, and in whose share."""
        if isinstance(asked, Copy):
            return asked.tier, asked.entry.size_bytes, asked.home
        return self._policy.tiers[RAM], self._readers.holds.sizes[asked], None

    def _candidates(self) -> Iterator[Copy | ExtentId]:
        """What readers hold, in the order in which it is asked for: what streams is given back soon anyway."""
        yield from self._readers.holds.sizes if RAM in self._policy.tiers else ()
        streaming = list[Copy]()
        for copy in islice(self._leased(), LOOKS):
            if copy.role is Role.AHEAD:
                streaming.append(copy)
            else:
                yield copy
        yield from streaming

    def _leased(self) -> Iterator[Copy]:
        """What readers have leases of, another one first each time."""
        readers = list(self._readers.readers.values())
        for at in range(len(readers)):
            reader = readers[(self._turn + at) % len(readers)]
            for copies in reader.leases.values() if reader.recalls < UNHEARD else ():
                yield from (copy for copy in copies if copy.usable and not copy.pinned)


def _may_be_of(copy: Copy, dataset: DatasetState | None) -> bool:
    """It is in nobody's share, and would be in this dataset's."""
    return copy.home is None and dataset is not None and dataset in copy.entry.datasets
