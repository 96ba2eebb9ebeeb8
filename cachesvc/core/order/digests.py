"""A digest of the samples that a run was given: a sum, so parts of ranks add up in any order.

It is the hash of a multiset by addition: AdHash of Bellare and Micciancio ("A new paradigm for collision-free hashing",
1997), with lanes that are added apart as in LtHash (Lewi et al., 2019). The digest of samples is the sum, modulo 2^64 in
each of four lanes, of h(extent, sample) = finalise(key + sample * golden), where the lanes of `key` are BLAKE2b-256 of a
digest of the extent's bytes. A part of a sample is named by several numbers, which are added and finalised in turn: a
pack's sum is over its parts of documents. The sum finds lost, repeated and other samples, and other bytes. It is no proof
against somebody who forges it: 256 bits of a sum are too few for that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from cachesvc.core.errors import InvalidInput
from cachesvc.core.order.permute import I64, U64, finalise_each

LANES = 4
DIGEST_BYTES = 8 * LANES
_GOLDENS = np.array(
    [0x9E3779B97F4A7C15, 0xD1B54A32D192ED03, 0xABC98388FB8FAC03, 0x8CB92BA72F3D8DD7], np.uint64
)
"""Odd factors that keep the lanes apart."""
_SLICE = 1 << 14
ContentsOf = Callable[[I64], Iterable[bytes]]
"""Gives digests of the bytes of extents, int64[m], ascending."""


class SampleSum:
    """A sum over samples. Immutable."""

    __slots__ = ("_lanes",)

    def __init__(self, lanes: U64 | None = None) -> None:
        self._lanes: U64 = np.zeros(LANES, np.uint64) if lanes is None else lanes

    def __add__(self, other: SampleSum) -> SampleSum:
        return SampleSum(self._lanes + other._lanes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SampleSum) and self.digest == other.digest

    __hash__ = None  # type: ignore[assignment]

    @property
    def digest(self) -> bytes:
        """The 32 bytes of the sum."""
        return self._lanes.astype("<u8").tobytes()


def parse_sum(text: str) -> SampleSum:
    """The sum of a digest in hex. Raises InvalidInput."""
    try:
        raw = bytes.fromhex(text)
    except ValueError:
        raw = b""
    if len(raw) != DIGEST_BYTES:
        raise InvalidInput(f"{text[:80]!r} is no digest of {DIGEST_BYTES} bytes in hex")
    return SampleSum(np.frombuffer(raw, "<u8").astype(np.uint64))


def sum_of(samples: I64, extent_first: I64, contents_of: ContentsOf) -> SampleSum:
    """The sum over samples of one dataset, int64[n], which may repeat. `extent_first` as of `EpochOrder`."""
    ascending = np.sort(samples)  # a search for each sample would take most of the time
    counts = np.diff(np.searchsorted(ascending, extent_first))
    held = np.flatnonzero(counts)
    return _summed(contents_of(held), np.repeat(np.arange(held.size), counts[held]), ascending)


def sum_of_parts(extents: I64, parts: Sequence[I64], contents_of: ContentsOf) -> SampleSum:
    """The sum over parts of samples, which may repeat: part i lies in extent `extents[i]`, and the i-th numbers of `parts`
    name it."""
    seen = np.zeros(int(extents.max(initial=-1)) + 1, np.bool_)  # faster than sorting
    seen[extents] = True
    held = np.flatnonzero(seen)
    return _summed(contents_of(held), np.searchsorted(held, extents), *parts)


def _summed(contents: Iterable[bytes], row: I64, *numbers: I64) -> SampleSum:
    """The sum over all i of h(contents[row[i]], numbers[0][i], numbers[1][i], ...)."""
    raw = (hashlib.blake2b(each, digest_size=DIGEST_BYTES).digest() for each in contents)
    keys = np.frombuffer(b"".join(raw), "<u8").astype(np.uint64).reshape(-1, LANES).T.copy()
    total, size = np.zeros(LANES, np.uint64), min(row.size, _SLICE)
    states, spares = np.empty(size, np.uint64), np.empty(size, np.uint64)
    for start in range(0, row.size, _SLICE):
        part = slice(start, start + _SLICE)
        rows, slices, lanes = row[part], [each[part].view(np.uint64) for each in numbers], []
        state, spare = states[: rows.size], spares[: rows.size]
        for key, golden in zip(keys, _GOLDENS, strict=True):
            np.take(key, rows, out=state, mode="clip")  # the other modes copy
            for each in slices:
                np.multiply(each, golden, out=spare)
                state += spare
                finalise_each(state, spare)
            lanes.append(state.sum())
        total += np.array(lanes)
    return SampleSum(total)
