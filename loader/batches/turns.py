"""Names the batches of a rank: a turn is one batch, step * accumulate + micro-batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class BatchKey(NamedTuple):
    """The epoch and turn of a batch."""

    epoch: int
    turn: int


@dataclass(frozen=True, slots=True)
class RankShare:
    """A rank's part of every global batch: the slots [low, high), in `accumulate` micro-batches."""

    low: int
    high: int
    batch_size: int

    @property
    def accumulate(self) -> int:
        """Batches of this rank per step."""
        return (self.high - self.low) // self.batch_size
