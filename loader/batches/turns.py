"""Names the batches of a rank: a turn is one batch, step * accumulate + micro-batch."""

from __future__ import annotations

from typing import NamedTuple


class BatchKey(NamedTuple):
    """The epoch and turn of a batch."""

    epoch: int
    turn: int
