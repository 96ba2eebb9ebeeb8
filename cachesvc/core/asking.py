"""Room that only readers could free is asked back from them.

What a reader holds is not evicted, and a reader maps what is kept for as long as it runs. So a dataset that came later
would never get its share: it streams, or is refused. Its extents that found no room say so (`Copies.cramped`), and once a
second some of what would give way, did nobody hold it, is asked for (`Recall`). Whoever reads it after that holds it for
one read, and it is evicted when nobody does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain, islice

from cachesvc.core.budgets import answering
from cachesvc.core.copies import Copies
from cachesvc.core.policy import Asked
from cachesvc.core.readers import Readers
from cachesvc.core.room import NOWHERE
from cachesvc.core.state import Copy, Entry

EVERY_S = 1.0
"""Readers at rest look no more often."""
OWED_S = 5.0
"""What was not given back by then may never be (views of it are out), so other room is asked for."""
MOST = 64
"""Copies in one go: a reader's buffer holds 333 messages."""
MESSAGES = 16_384
"""Readers that are looked at to tell them of all these: 2 ms."""
LOOKS = 4096
"""Leases looked at for one extent: 1 ms."""
EXTENTS = 4
"""For which that is done in one go, of four datasets; the others' come again."""


class Asking:
    """Copies that were asked for and are still held."""

    def __init__(self, copies: Copies, readers: Readers) -> None:
        self._copies, self._readers = copies, readers
        self._policy, self._moment = copies.policy, copies.moment
        self._asked_at = -math.inf
        self._owed: dict[Copy, float] = {}
        """When each was asked for."""
        self._turn = 0

    def feed(self) -> None:
        """Ask for room where extents found none."""
        now, cramped, shares = self._moment.now, self._copies.cramped, self._policy.shares
        if now < self._asked_at + EVERY_S or not (cramped or shares.lacking):
            return
        self._asked_at, self._turn, self._copies.cramped = now, self._turn + 1, {}
        self._owed = {copy: at for copy, at in self._owed.items() if copy.asked_back and copy.leases}
        spare = shares.spare_bytes()
        found = [(home, entry) for home, entry in cramped.items() if home in entry.datasets]
        shares.lacking = {home for home, entry in found if self._lack(entry, spare[home]) >= entry.size_bytes}
        most = max(1, min(MOST, MESSAGES // max(1, len(self._readers.readers))))
        chosen = chain.from_iterable(self._chosen(entry, spare[home]) for home, entry in found[:EXTENTS])
        for copy in islice(chosen, most):
            copy.asked_back = True
            self._owed[copy] = now
            self._readers.recall(copy, wrong=False)

    def _lack(self, entry: Entry, spare_bytes: float) -> float:
        """Bytes that an extent's dataset may keep and does not, by its share."""
        return max(0.0, -spare_bytes) if self._policy.shares.within_quota(entry) else 0.0

    def _chosen(self, entry: Entry, spare_bytes: float) -> Iterator[Copy]:
        """What is kept beyond its dataset's share, as much as is kept beyond the room for it, and as this extent's dataset
        lacks of its own share; where the extent has no room at all, what streams."""
        size, lack, spare = (
            entry.size_bytes,
            self._lack(entry, spare_bytes),
            self._policy.shares.spare_bytes(),
        )
        tiers = [
            tier
            for tier in answering(self._policy.tiers)
            if size <= tier.budget_bytes and not tier.full_until
        ]
        wanted = {tier: lack + max(0, tier.kept_bytes - tier.keep_bytes) for tier in tiers}
        refused = not entry.copies and self._policy.place(entry, Asked.DEMAND) == NOWHERE
        nowhere = size if refused else 0
        for copy, at in self._owed.items():
            lately = copy.entry.size_bytes if self._moment.now < at + OWED_S else 0
            nowhere -= lately
            if copy.tier in wanted:
                wanted[copy.tier] -= lately
            if copy.home is not None:
                spare[copy.home] -= lately
        if nowhere <= 0 and max(wanted.values(), default=0.0) < size:
            return
        streaming = list[Copy]()
        for copy in islice(self._leased(), LOOKS):
            if copy.tier not in wanted or not copy.usable or copy.asked_back or copy.entry.pinned:
                continue
            held = copy.entry.size_bytes
            if copy.home is None:
                streaming.append(copy)
            elif wanted[copy.tier] >= held and spare[copy.home] >= held:
                wanted[copy.tier] -= held
                spare[copy.home] -= held
                nowhere -= held
                yield copy
        for copy in streaming:
            if nowhere > 0 and not copy.asked_back:
                nowhere -= copy.entry.size_bytes
                yield copy

    def _leased(self) -> Iterator[Copy]:
        """What readers hold, another one first each time."""
        readers = list(self._readers.readers.values())
        for at in range(len(readers)):
            for copies in readers[(self._turn + at) % len(readers)].leases.values():
                yield from copies
