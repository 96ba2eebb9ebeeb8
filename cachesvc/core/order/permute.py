"""Keyed permutations of [0, n): random order without an index array.

Construction: an alternating Feistel network on a domain of a * 2^b >= n values (Black & Rogaway, "Ciphers
with Arbitrary Finite Domains", CT-RSA 2002; for shuffling: Mitchell, Stokes, Frank, Holmes,
"Bandwidth-Optimal Random Shuffling for GPUs", 2021). A value is (high, low) with high in [0, a) and low in
[0, 2^b); rounds add a hash of low to high modulo a, then xor a hash of high into low. a is chosen just large
enough, so that almost no value leaves [0, n); one that does is fed back until it lands inside (cycle
walking), which keeps the map a bijection of exactly [0, n).

Keys come from splitmix64's finaliser (Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators",
OOPSLA 2014). This is a shuffle, not a cipher: nothing here is secret.

Every round is 32-bit arithmetic, for any n up to 2^48.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

ROUNDS = 16
"""Four make a Feistel network pseudorandom on large domains (Luby & Rackoff), but a block may hold five
samples: over all permutations of 5 and 6 elements, 8 and 12 rounds are visibly uneven, 16 are uniform."""

MAX_SIZE = 1 << 48

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_SLICE = 1 << 14
"""Positions permuted at a time: the three 64 KiB work arrays stay in a core's cache."""
SPREAD = np.uint32(0x7FEB352D)
SETTLE = np.uint32(0x846CA68B)
"""The factors of `_hash`."""
_HALF = np.uint32(16)


class Use(IntEnum):
    """The use of a key of the sample order, so that equal numbers never give equal keys."""

    EXTENTS = 1
    BLOCK = 2
    SAMPLE = 3
    OFFSET = 4
    INSIDE = 5
    HOMES = 6


def mix(*parts: int) -> int:
    """64 bits that depend on every part and on their order: h = finalise((h + golden) ^ part), from h = 0.

    Parts are taken modulo 2^64.
    """
    state = 0
    for part in parts:
        state = _finalise((state + _GOLDEN & _MASK) ^ (part & _MASK))
    return state


def mix_each(prefix: int | U64, parts: npt.NDArray[Any]) -> U64:
    """`mix(*before, part)` for an array of last parts, where `prefix` is `mix(*before)`, or one for each part. uint64."""
    state: U64 = np.asarray(prefix, np.uint64) + np.array([_GOLDEN], np.uint64) ^ parts.astype(np.uint64)
    finalise_each(state, np.empty_like(state))
    return state


def finalise_each(state: U64, spare: U64) -> None:
    """The finaliser of SplitMix64, in place. `spare` is scratch."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        np.right_shift(state, np.uint64(shift), out=spare)
        state ^= spare
        state *= np.uint64(factor)
    np.right_shift(state, np.uint64(31), out=spare)
    state ^= spare


def permute(values: npt.NDArray[Any], size: int, key: int) -> U64:
    """The images of `values` (each in [0, size)) under the permutation of [0, size) that `key` names.

    Any shape; uint64 of the same shape. `size` is 1 to `MAX_SIZE`. About 20 ns a value in slabs of 65,536.
    """
    assert 1 <= size <= MAX_SIZE
    network = Network(np.array([size], np.uint64), np.array([key & _MASK], np.uint64))
    return network.permute(values.reshape(-1)).reshape(values.shape)


def unpermute(image: int, size: int, key: int) -> int:
    """The value whose image under `permute` is `image`."""
    return Network(np.array([size], np.uint64), np.array([key & _MASK], np.uint64)).inverse(image)


def permute_groups(values: npt.NDArray[Any], group: I64, sizes: I64, keys: U64) -> U64:
    """`permute`, where value i belongs to the permutation (sizes[group[i]], keys[group[i]]).

    For many small permutations at once: about three times the cost of `permute` a value. One-dimensional.
    """
    return Network(sizes.astype(np.uint64), keys).permute(values, group)


def _finalise(state: int) -> int:
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


def distinct(values: I64) -> I64:
    """The values in ascending order, each once. `np.unique` would first import numpy's masked arrays."""
    ascending = np.sort(values)
    found: I64 = ascending[np.diff(ascending, prepend=ascending[:1] - 1) != 0]
    return found


class Network:
    """The rounds of g permutations: arrays of length g, or of length 1 that broadcast.

    A value is (high, low): the low half has `low_bits` bits, uint64[g], and the high half is below `highs`, uint32[g].
    `keys`: of each round, uint32[rounds, g].
    """

    __slots__ = ("highs", "keys", "low_bits", "sizes")

    def __init__(self, sizes: U64, keys: U64, rounds: int = ROUNDS) -> None:
        bits = _bit_length(sizes - np.uint64(1))
        self.sizes = sizes
        self.low_bits = np.maximum(bits // np.uint64(2), bits - np.minimum(bits, np.uint64(16)))
        self.highs = (((sizes - np.uint64(1)) >> self.low_bits) + np.uint64(1)).astype(np.uint32)
        numbers = np.arange(rounds, dtype=np.uint64)[:, None] * np.uint64(_GOLDEN)
        self.keys = (mix_each(0, numbers + keys) >> np.uint64(32)).astype(np.uint32)

    def permute(self, values: npt.NDArray[Any], group: I64 | None = None) -> U64:
        """The images of `values`, where value i belongs to the permutation `group[i]`. One-dimensional."""
        images = values.astype(np.uint64)
        for start in range(0, images.size, _SLICE):
            part = slice(start, start + _SLICE)
            self._walk(images[part], None if group is None else group[part])
        return images

    def inverse(self, image: int, group: int = 0) -> int:
        """The value whose image under one of the permutations is `image`."""
        size, low_bits, highs = (int(each[group]) for each in (self.sizes, self.low_bits, self.highs))
        keys = [int(key) for key in self.keys[:, group]]
        value = image
        while True:
            high, low = value >> low_bits, value & ((1 << low_bits) - 1)
            for number in reversed(range(len(keys))):
                hashed = _hash_one(high if number % 2 else low, keys[number])
                if number % 2:
                    low ^= hashed >> (32 - low_bits)
                else:
                    high = (high - ((hashed >> 16) * highs >> 16)) % highs
            value = high << low_bits | low
            if value < size:
                return value

    def _walk(self, values: U64, group: I64 | None) -> None:
        """Permute `values` in place, feeding back those that left [0, size)."""
        values[:] = self._rounds(values, group)
        outside = np.flatnonzero(values >= (self.sizes if group is None else self.sizes[group]))
        while outside.size:
            among = None if group is None else group[outside]
            again = self._rounds(values[outside], among)
            values[outside] = again
            outside = outside[again >= (self.sizes if among is None else self.sizes[among])]

    def _rounds(self, values: U64, group: I64 | None) -> U64:
        """One pass of all rounds: each adds a hash of the low half to the high half, or the other way round."""
        low_bits, highs = self.low_bits, self.highs
        if group is not None:
            low_bits, highs = low_bits[group], highs[group]
        low_drop = (np.uint64(32) - low_bits).astype(np.uint32)
        high = (values >> low_bits).astype(np.uint32)
        low = (values & ((np.uint64(1) << low_bits) - np.uint64(1))).astype(np.uint32)
        hashed, spare = np.empty_like(low), np.empty_like(low)
        for number in range(len(self.keys)):
            keys = self.keys[number] if group is None else self.keys[number][group]
            _hash(low if number % 2 == 0 else high, keys, hashed, spare)
            if number % 2:
                hashed >>= low_drop
                low ^= hashed
                continue
            hashed >>= _HALF
            hashed *= highs
            hashed >>= _HALF
            high += hashed
            np.subtract(high, highs, out=spare)
            np.minimum(
                high, spare, out=high
            )  # high mod highs: below it, the difference wraps to something huge
        joined: U64 = high.astype(np.uint64)
        joined <<= low_bits
        joined |= low
        return joined


def _hash(source: U32, keys: U32, into: U32, spare: U32) -> None:
    """Set `into` to a 32-bit hash of (source, key) whose high bits are good. `spare` is scratch."""
    np.add(source, keys, out=into)
    into *= SPREAD
    np.right_shift(into, _HALF, out=spare)
    into ^= spare
    into *= SETTLE


def _hash_one(source: int, key: int) -> int:
    """`_hash` of one number."""
    hashed = (source + key) * int(SPREAD) & 0xFFFFFFFF
    hashed ^= hashed >> 16
    return hashed * int(SETTLE) & 0xFFFFFFFF


def _bit_length(values: U64) -> U64:
    """int.bit_length of each value, by halving, which is exact; the log2 of a float is not."""
    bits: U64 = np.zeros(values.shape, np.uint64)
    rest = values.copy()
    for shift in (32, 16, 8, 4, 2, 1):
        step = np.uint64(shift) * (rest >> np.uint64(shift) != 0)
        bits += step
        rest >>= step
    bits += rest
    return bits
