"""The sample order computed on a device: the full batches of a rank, equal to those of `EpochOrder.slots`.

The arithmetic is that of `core/order/permute.py`, in int64, for the blocks of many batches at once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from cachesvc.core.order.epoch_order import OrderTables
from cachesvc.core.order.extent_run import CutExtents
from cachesvc.core.order.permute import SETTLE, SPREAD, Network

_LOW_32 = (1 << 32) - 1


class DeviceOrder:
    """The samples of a rank's full batches as tensors. Calls are queued on the current stream."""

    def __init__(self, tables: OrderTables, device: torch.device) -> None:
        self._device = device
        self._base, self._width, self._block_first, self._run_first, self._shift = (
            upload(each, device)
            for each in (*tables.places, tables.block_first, tables.run_first, tables.shift)
        )
        self._permutations = _Permutations(tables.network, device) if tables.network is not None else None
        self._cut = _CutExtents(tables.cut, device)

    def samples(self, first_step: int, last_step: int) -> torch.Tensor:
        """Return the samples of the full batches [first_step, last_step), int64[steps * slots]. The processor waits for
        the device."""
        steps = torch.arange(first_step, last_step, device=self._device)[:, None]
        positions = (self._base + steps * self._width).reshape(-1)
        if self._permutations is None:
            return positions
        block = interval_of(positions, self._block_first)
        begin = self._block_first[block]
        positions = self._permutations.permute(positions.sub_(begin), block).add_(begin)
        entry = interval_of(positions, self._run_first)
        return self._cut.permute(positions.add_(self._shift[entry]), entry)


class _CutExtents:
    """Permutes the samples of the extents that a border of the run cuts."""

    def __init__(self, cut: CutExtents, device: torch.device) -> None:
        self._row, self._first = upload(cut.row, device), upload(cut.first, device)
        self._permutations = _Permutations(cut.network, device)

    def permute(self, samples: torch.Tensor, entry: torch.Tensor) -> torch.Tensor:
        """Permute `samples`, which are in the entries `entry` of the run, in place."""
        row = self._row[entry]
        inside = (row >= 0).nonzero().squeeze(1)
        row = row[inside]
        first = self._first[row]
        samples[inside] = self._permutations.permute(samples[inside] - first, row) + first
        return samples


class _Permutations:
    """See `Network`."""

    def __init__(self, network: Network, device: torch.device) -> None:
        self._sizes, self._low_bits, self._highs = (
            upload(each, device) for each in (network.sizes, network.low_bits, network.highs)
        )
        self._keys = upload(network.keys, device)

    def permute(self, values: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
        """Return the image of each value under the permutation of its group."""
        sizes = self._sizes[group]
        found = self._rounds(values, group)
        outside = (found >= sizes).nonzero().squeeze(1)
        while len(outside):
            again = self._rounds(found[outside], group[outside])
            found[outside] = again
            outside = outside[again >= sizes[outside]]
        return found

    def _rounds(self, values: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
        low_bits, highs = self._low_bits[group], self._highs[group]
        low_drop = 32 - low_bits
        high = values >> low_bits
        low = values & ((1 << low_bits) - 1)
        for number in range(len(self._keys)):
            keys = self._keys[number][group]
            if number % 2:
                low ^= _hash(high, keys).bitwise_right_shift_(low_drop)
            else:
                high += _hash(low, keys).bitwise_right_shift_(16).mul_(highs).bitwise_right_shift_(16)
                high -= highs * (high >= highs)
        return high.bitwise_left_shift_(low_bits).bitwise_or_(low)


def _hash(source: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return 32-bit hashes; only the low 32 bits of a product count, so its overflow does no harm. `keys` is scratch."""
    found = keys.add_(source).mul_(int(SPREAD)).bitwise_and_(_LOW_32)
    found ^= found >> 16
    return found.mul_(int(SETTLE)).bitwise_and_(_LOW_32)


def interval_of(values: torch.Tensor, firsts: torch.Tensor) -> torch.Tensor:
    """Return which of the intervals that begin at `firsts`, ascending, each value is in."""
    return torch.searchsorted(firsts, values, right=True).sub_(1)


def shifted(values: torch.Tensor, firsts: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """Add to each value the shift of its interval, in place."""
    return values.add_(shift[interval_of(values, firsts)])


def upload(numbers: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
    """Return numbers below 2^63 as int64 in device memory."""
    return torch.from_numpy(numbers.astype(np.int64)).to(device)
