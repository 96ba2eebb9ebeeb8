"""A rank's part of every global batch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankShare:
    """The slots [low, high), in `accumulate` micro-batches."""

    low: int
    high: int
    batch_size: int

    @property
    def accumulate(self) -> int:
        """Batches of this rank per step."""
        return (self.high - self.low) // self.batch_size
