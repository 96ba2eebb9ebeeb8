"""The budget of hedges: the bytes that may be asked of sources twice, and which of several late reads goes first."""

from __future__ import annotations

from dataclasses import dataclass, field

HEDGE_SHARE = 0.02
"""The most bytes that are asked for twice, as a part of all: the source's load and bill grow by no more."""
CLAIM_S = 0.25
"""How long a process that was refused keeps its place before others. It asks again sooner."""
MAX_CLAIMS = 16


@dataclass(slots=True)
class HedgeBudget:
    """The bytes that are left, and the processes that wait for some. A read with a lower rank is needed sooner."""

    left_bytes: float = 0.0
    claims: dict[int, tuple[float, float]] = field(default_factory=dict)
    """The rank of the first late read of each process that was refused, and until when that counts."""

    def earn(self, received_bytes: int, share: float = HEDGE_SHARE) -> None:
        """Count bytes that a source sent."""
        self.left_bytes += received_bytes * share

    def fits(self, size_bytes: int) -> bool:
        """Return whether so many bytes are left."""
        return size_bytes <= self.left_bytes

    def spend(self, size_bytes: int) -> None:
        """Take bytes out of the budget; negative: put them back."""
        self.left_bytes -= size_bytes

    def take(self, process: int, rank: float, size_bytes: int, now: float) -> bool:
        """Take the bytes for a read, unless too few are left, or another process waits for them with a read of a lower
        rank. Return whether they were taken."""
        self.claims = {each: claim for each, claim in self.claims.items() if claim[1] > now}
        self.claims.pop(process, None)
        first = all(rank <= other for other, _ in self.claims.values())
        if self.fits(size_bytes if first else 2 * size_bytes):
            self.spend(size_bytes)
            return True
        if len(self.claims) < MAX_CLAIMS:
            self.claims[process] = rank, now + CLAIM_S
        return False
