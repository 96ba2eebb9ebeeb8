"""Asks readers to give back room that only they can free.

Leased copies are not evicted, and a reader maps kept copies for as long as it runs. So a dataset that comes later would
never get its share: it would stream, or be refused. Its extents that find no room are noted (`Copies.short_of_room`). Once
a second, some leased copies that would otherwise be evicted for it are recalled (`Recall`). A recalled copy is granted for
one read only, and is evicted as soon as it is idle. A tier beyond its budget recalls copies too: memory that readers map
cannot be taken from them. Holds from before the daemon's restart are in no dataset's share, and are recalled first.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from itertools import chain, islice

from cachesvc.core.model import RAM, ExtentId
from cachesvc.core.node.readers import Readers
from cachesvc.core.records.dataset_state import DatasetState
from cachesvc.core.records.residency import CacheEntry, Copy, Role, TierState
from cachesvc.core.tiering.budgets import answering
from cachesvc.core.tiering.copies import Copies
from cachesvc.core.tiering.policy import Requester
from cachesvc.core.tiering.room import NOWHERE

INTERVAL_S = 1.0
"""Between two rounds of recalls. Idle readers look for recalls no more often."""
REPLY_S = 5.0
"""After this time, other room is recalled: the reader may never give the first back, say because views of it are out."""
ROUND_EXTENTS = 64
"""Extents recalled in one round. A reader's socket buffer holds 333 messages."""
UNANSWERED_LIMIT = 128
"""Recalls without any release after which a reader is sent no more. A stopped process would fill its socket buffer and be
taken for dead, while it still maps its extents."""
ROUND_READERS = 16_384
"""Readers examined to send one round of recalls: 2 ms."""
LEASES_EXAMINED = 4096
"""Leases examined for one extent: 1 ms."""
ROUND_DATASETS = 4
"""Datasets for which room is recalled in one round, an extent of each; the others note their extents again."""


class Reclaim:
    """The recalls that readers have not answered yet."""

    def __init__(self, copies: Copies, readers: Readers) -> None:
        self._copies, self._readers = copies, readers
        self._policy, self._context = copies.policy, copies.context
        self._round_at = -math.inf
        self._again_at = math.inf
        self._recalled: dict[Copy | ExtentId, float] = {}
        """When each was recalled: copies, and extents held from before the restart."""
        self._rounds = 0

    def next_deadline(self) -> float:
        """The time of the next round for a tier beyond its budget; inf where there is none. Extents that look for room come
        with events."""
        return self._again_at

    def feed(self) -> None:
        """Recall room where extents found none, or a tier is beyond its budget."""
        now, short, shares = self._context.now, self._copies.short_of_room, self._policy.shares
        excess, self._again_at = self._excess(), math.inf
        if not (excess or short or shares.below_share):
            return
        if now < self._round_at + INTERVAL_S:
            self._again_at = self._round_at + INTERVAL_S if excess else math.inf
            return
        self._round_at, self._rounds, self._copies.short_of_room = now, self._rounds + 1, {}
        self._recalled = {each: at for each, at in self._recalled.items() if self._is_held(each)}
        spare = shares.spare_bytes()
        wanting = [(home, entry) for home, entry in short.items() if home in entry.datasets]
        shares.below_share = {
            home for home, entry in wanting if self._deficit(entry, spare[home]) >= entry.size_bytes
        }
        most = max(1, min(ROUND_EXTENTS, ROUND_READERS // max(1, len(self._readers.readers))))
        for_extents = (self._for_extent(entry, spare[home]) for home, entry in wanting[:ROUND_DATASETS])
        for each in islice(chain(self._for_budgets(excess), *for_extents), most):
            self._recalled[each] = now
            if isinstance(each, Copy):
                each.recalled = True
                self._readers.recall(each, wrong=False)
            else:
                self._readers.recall_hold(each)
        if excess and any(now < at + REPLY_S for at in self._recalled.values()):
            self._again_at = now + INTERVAL_S

    def _is_held(self, recalled: Copy | ExtentId) -> bool:
        if isinstance(recalled, Copy):
            return recalled.recalled and recalled.leases > 0
        return recalled in self._readers.holds.sizes

    def _excess(self) -> dict[TierState, float]:
        """Bytes by which tiers exceed their budgets, beside what is being evicted."""
        over = {tier: -tier.free_bytes - tier.evicting_bytes for tier in answering(self._policy.tiers)}
        return {tier: size_bytes for tier, size_bytes in over.items() if size_bytes > 0}

    def _for_budgets(self, excess: dict[TierState, float]) -> Iterator[Copy | ExtentId]:
        """Choose copies to recall until no tier exceeds its budget. Any dataset may lose copies, below its share
        too."""
        spare: dict[DatasetState, float] = defaultdict(lambda: math.inf)
        if excess:
            yield from self._choose(excess, 1, sum(excess.values()), spare)

    def _deficit(self, entry: CacheEntry, spare_bytes: float) -> float:
        """Bytes that an extent's dataset may keep by its share and does not."""
        return max(0.0, -spare_bytes) if self._policy.shares.within_quota(entry) else 0.0

    def _for_extent(self, entry: CacheEntry, spare_bytes: float) -> Iterator[Copy | ExtentId]:
        """Choose copies to recall for an extent: the bytes that tiers keep beyond their room to keep, plus the bytes
        that the extent's dataset lacks of its share. An extent that finds no room at all takes up to the size of the
        window, streaming copies included."""
        size, deficit = entry.size_bytes, self._deficit(entry, spare_bytes)
        tiers = [
            tier for tier in answering(self._policy.tiers) if size <= tier.budget_bytes and not tier.full
        ]
        wanted = {tier: deficit + max(0, tier.kept_bytes - tier.keep_bytes) for tier in tiers}
        refused = not entry.copies and self._policy.place(entry, Requester.PLANNED_READER) == NOWHERE
        reserve = self._policy.reserve
        if refused and reserve.tier in wanted:
            wanted[reserve.tier] = max(wanted[reserve.tier], reserve.window_bytes)
        spare = self._policy.shares.spare_bytes()
        yield from self._choose(wanted, size, size if refused else 0, spare, entry.datasets[0])

    def _choose(
        self,
        wanted: dict[TierState, float],
        least_bytes: int,
        any_bytes: float,
        spare: dict[DatasetState, float],
        requester: DatasetState | None = None,
    ) -> Iterator[Copy | ExtentId]:
        """Choose what to recall, beside what was recalled lately: `wanted` bytes of each tier, where that is at least
        `least_bytes`. They come from copies in no share, and from datasets that have bytes to `spare`, up to those
        bytes. `any_bytes` more may be streaming copies, or copies that the `requester` might keep."""
        for each in (each for each, at in self._recalled.items() if self._context.now < at + REPLY_S):
            tier, size, home = self._account_of(each)
            any_bytes -= size
            if tier in wanted:
                wanted[tier] -= size
            if home is not None:
                spare[home] -= size
        if any_bytes <= 0 and max(wanted.values(), default=0.0) < least_bytes:
            return
        for each in self._candidates():
            tier, size, home = self._account_of(each)
            if tier not in wanted or each in self._recalled:
                continue
            comes_back = isinstance(each, Copy) and (
                each.role is Role.AHEAD or _may_be_kept_for(each, requester)
            )
            due = not comes_back and wanted[tier] >= least_bytes and (home is None or spare[home] >= size)
            if due or (any_bytes > 0 and home is None):
                any_bytes -= size
                wanted[tier] -= size
                if home is not None:
                    spare[home] -= size
                yield each

    def _account_of(self, recalled: Copy | ExtentId) -> tuple[TierState, int, DatasetState | None]:
        """The tier, the size in bytes, and the dataset in whose share it is."""
        if isinstance(recalled, Copy):
            return recalled.tier, recalled.entry.size_bytes, recalled.home
        return self._policy.tiers[RAM], self._readers.holds.sizes[recalled], None

    def _candidates(self) -> Iterator[Copy | ExtentId]:
        """Copies and holds of readers, in the order of recall. Streaming copies come last: readers give them back soon
        anyway."""
        yield from self._readers.holds.sizes if RAM in self._policy.tiers else ()
        streaming = list[Copy]()
        for copy in islice(self._leased(), LEASES_EXAMINED):
            if copy.role is Role.AHEAD:
                streaming.append(copy)
            else:
                yield copy
        yield from streaming

    def _leased(self) -> Iterator[Copy]:
        """Leased copies, those of another reader first in each round."""
        readers = list(self._readers.readers.values())
        for index in range(len(readers)):
            reader = readers[(self._rounds + index) % len(readers)]
            for copies in reader.leases.values() if reader.recalls < UNANSWERED_LIMIT else ():
                yield from (copy for copy in copies if copy.usable and not copy.pinned)


def _may_be_kept_for(copy: Copy, dataset: DatasetState | None) -> bool:
    """It is in no share, and could be in this dataset's."""
    return copy.home is None and dataset is not None and dataset in copy.entry.datasets
