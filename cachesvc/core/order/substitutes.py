"""Which sample stands in for a bad one: a pure function of (seed, epoch, position), so that every rank, worker
and restart chooses the same.

Near first: the same slot of the global batches 1, 2, 4 ... 128 steps back. Their extents were just read, by the
same canonical node, so a cache has them; the doubling leaves an extent that is bad as a whole. Then anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator

from cachesvc.core.order.permute import mix

NEAR, FAR = 8, 24
"""Where half of all samples are bad, 32 tries fail once in 4 * 10^9 times."""
_USE = 0x5AB5
"""Keeps these keys apart from those of `core/order/epoch_order.py`."""


def substitutes(seed: int, epoch: int, position: int, global_batch: int, positions: int) -> Iterator[int]:
    """Positions to try in turn, each in [0, positions); `position` itself is left out."""
    for power in range(NEAR):
        near = (position - (global_batch << power)) % positions
        if near != position:
            yield near
    for attempt in range(FAR):
        far = mix(_USE, seed, epoch, position, attempt) % positions
        if far != position:
            yield far
