"""Chooses the sample that replaces a bad one: a pure function of (seed, epoch, position), so that every rank, worker and
restart chooses the same.

Near positions come first: the same slot of the global batches 1, 2, 4 ... 128 steps back. The same canonical node has just
read their extents, so a cache has them; the doubling soon leaves an extent that is bad as a whole. Then any position.
"""

from __future__ import annotations

from collections.abc import Iterator

from cachesvc.core.order.permute import mix

NEAR_TRIES, OTHER_TRIES = 8, 24
"""Numbers of near and of other positions. Where half of all samples are bad, 32 tries fail once in 4 * 10^9 times."""
_USE = 0x5AB5
"""Keeps these keys apart from those of `core/order/epoch_order.py`."""


def substitutes(seed: int, epoch: int, position: int, global_batch: int, positions: int) -> Iterator[int]:
    """Yield positions to try in turn, each in [0, positions), without `position` itself."""
    for power in range(NEAR_TRIES):
        near = (position - (global_batch << power)) % positions
        if near != position:
            yield near
    for attempt in range(OTHER_TRIES):
        other = mix(_USE, seed, epoch, position, attempt) % positions
        if other != position:
            yield other
