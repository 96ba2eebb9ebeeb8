"""The slow check of what lies on disk: which copy to verify next, and when.

Copies are verified in turn, one at a time, at `bytes_per_s` on average: after each the scrub rests for as long
as its bytes take at that rate. RAM is left out: its bytes do not rest long enough to rot, and ECC watches them.
"""

from __future__ import annotations

from collections import deque

from cachesvc.core.copies import Copies
from cachesvc.core.model import RAM, ExtentId, TierName
from cachesvc.core.state import Copy, Phase

LOOKS = 64
"""Places in the round looked at in one step; those whose copy has gone are skipped and dropped."""


class Scrub:
    """The round of copies, and the one being verified."""

    def __init__(self, copies: Copies, bytes_per_s: int) -> None:
        self._copies = copies
        self._bytes_per_s = bytes_per_s
        self._round: deque[tuple[ExtentId, TierName]] = deque()
        self._listed: set[tuple[ExtentId, TierName]] = set()
        self._due_at = 0.0
        self.checking: tuple[ExtentId, TierName] | None = None

    def admit(self, extent: ExtentId, tier: TierName) -> None:
        """A copy became resident: it is verified after all that are waiting."""
        if self._bytes_per_s and tier != RAM and (extent, tier) not in self._listed:
            self._listed.add((extent, tier))
            self._round.append((extent, tier))

    def next_deadline(self) -> float | None:
        """When the next copy is due; None while there is none or one is being verified."""
        return self._due_at if self._round and self.checking is None else None

    def next(self, now: float) -> Copy | None:
        """The copy to verify now."""
        if self.checking is not None or now < self._due_at:
            return None
        for _ in range(min(LOOKS, len(self._round))):
            place = self._round.popleft()
            copy = self._copies.find(place[0], self._copies.policy.tiers[place[1]])
            if copy is None or copy.phase is not Phase.RESIDENT or copy.doomed:
                self._listed.remove(place)
                continue
            self._round.append(place)
            if copy.committed and not copy.tier.lost:
                self.checking = place
                self._due_at = now + copy.entry.size_bytes / self._bytes_per_s
                return copy
        self._due_at = now + 1.0  # nothing that can be verified: look again, without turning in a circle
        return None

    def done(self, extent: ExtentId, tier: TierName) -> bool:
        """A check ended; False for one that is not (or no longer) ours."""
        if self.checking != (extent, tier):
            return False
        self.checking = None
        return True

    def lost(self, tier: TierName) -> None:
        """Wait no longer for a check in a tier that is lost."""
        if self.checking is not None and self.checking[1] == tier:
            self.checking = None
