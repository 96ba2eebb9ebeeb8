"""Mixtures: which dataset each slot of an epoch is drawn from, and which of its samples.

A `Pattern` repeats every `period` slots, in which each component has exactly its share. It is a tree of two-way splits, the
two lightest joined first (Huffman). A split gives its left side floor(n * left / whole + 1/2) of its first n slots. So
counts over any prefix, and their inverse, are closed forms: no table, O(1) seek, exact at any scale. A count is within 1
slot of its weight for up to three components, and for equal weights; within 1/2 * sum(w / a) over the component and its
ancestors a below the root in every case, 2.2 at most.

A component's draws are numbered through all epochs of the job. Draw d is sample d mod n of the component's own epoch
d div n. So what repeats is the next permutation of the whole component, and a mixture that takes only a part of a
component goes on with the rest of it in its next epoch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from heapq import heapify, heappop, heappush
from typing import Literal, NamedTuple, Protocol

import numpy as np

from cachesvc.core.arguments import whole_number
from cachesvc.core.errors import InvalidInput
from cachesvc.core.order.assignment import I64
from cachesvc.core.order.epoch_order import OrderSpec, Touches
from cachesvc.core.order.excluded import excluded_in
from cachesvc.core.order.permute import MAX_SIZE, mix
from cachesvc.core.order.recent import Latest
from cachesvc.core.order.run import Run

Size = int | Literal["total", "first", "last", "once"]
MAX_PERIOD = 1 << 31
"""Products of two slots fit 64 bits. Weights that need more are rounded to this, an error of 5e-10."""
MAX_DRAWS = 2**63 - 1
"""Limit of the draws of all components together: spots are int64, which would overflow."""
MAX_PASSES = 16
"""A component that is repeated more often than this in an epoch is planned as touched throughout."""
_RUNS_KEPT = 64


class Draws(Protocol):
    """Which component each slot is drawn from. See `Pattern`."""

    def count(self, component: int, slots: int) -> int: ...

    def choose(self, slots: I64) -> tuple[I64, I64]: ...

    def slot(self, component: int, nth: I64) -> I64: ...


class _Split(NamedTuple):
    """One step from a node of `whole` slots a period to a child of `own`; `left` of its slots go left."""

    whole: int
    left: int
    own: int
    is_left: bool


class Pattern:
    """The repeating choice of components in the proportion of integer `shares`, at least one above 0."""

    def __init__(self, shares: Sequence[int]) -> None:
        divisor = math.gcd(*shares)
        self.shares = tuple(share // divisor for share in shares)
        self.period = sum(self.shares)
        assert 0 < self.period <= MAX_PERIOD
        assert min(self.shares) >= 0
        self._paths = _paths(self.shares)

    def count(self, component: int, slots: int) -> int:
        """Draws of a component among the first `slots` slots."""
        cycles, prefix = divmod(slots, self.period)
        for split in self._paths[component]:
            left = (prefix * split.left + split.whole // 2) // split.whole
            prefix = left if split.is_left else prefix - left
        return cycles * self.shares[component] + (prefix if self.shares[component] else 0)

    def choose(self, slots: I64) -> tuple[I64, I64]:
        """The component that each slot draws from, and the number of that draw among the component's, from 0."""
        cycles, inside = np.divmod(slots, self.period)
        component, nth = np.empty_like(slots), np.empty_like(slots)
        self._walk(0, list(range(len(self.shares))), np.arange(slots.size), inside, component, nth)
        nth += cycles * np.asarray(self.shares, np.int64)[component]
        return component, nth

    def slot(self, component: int, nth: I64) -> I64:
        """The slot of a component's nth draw: the inverse of `choose`."""
        cycles, at = np.divmod(nth, self.shares[component])
        for whole, left, own, is_left in reversed(self._paths[component]):
            half = whole // 2
            at = -((half - (at + 1) * whole) // left) - 1 if is_left else (at * whole + half) // own
        slots: I64 = cycles * self.period + at
        return slots

    def _walk(self, depth: int, among: list[int], rows: I64, inside: I64, component: I64, nth: I64) -> None:
        """Descend to the leaves below one node. `among`: the components that share the slots `rows`."""
        among = [one for one in among if self.shares[one]]
        if len(among) == 1:
            component[rows], nth[rows] = among[0], inside
            return
        split = self._paths[among[0]][depth]
        before = (inside * split.left + split.whole // 2) // split.whole
        goes_left = ((inside + 1) * split.left + split.whole // 2) // split.whole > before
        left = [one for one in among if self._paths[one][depth].is_left]
        right = [one for one in among if not self._paths[one][depth].is_left]
        self._walk(depth + 1, left, rows[goes_left], before[goes_left], component, nth)
        self._walk(depth + 1, right, rows[~goes_left], (inside - before)[~goes_left], component, nth)


class Phases:
    """Patterns one after another: pairs of a first slot, ascending from 0, and the pattern from there on. The last of
    several at one slot counts."""

    def __init__(self, patterns: Sequence[tuple[int, Pattern]]) -> None:
        found = dict(patterns)
        self._patterns = [*found.values()]
        self._first = np.asarray([*found], np.int64)
        before = [[0] * len(self._patterns[0].shares)]
        for pattern, slots in zip(self._patterns, np.diff(self._first).tolist(), strict=False):
            before.append([drawn + pattern.count(index, slots) for index, drawn in enumerate(before[-1])])
        self._before = np.asarray(before, np.int64)
        """The draws of each component before each phase, [phases, components]."""

    def count(self, component: int, slots: int) -> int:
        """See `Pattern.count`."""
        phase = max(0, int(np.searchsorted(self._first, slots, "left")) - 1)
        rest = slots - int(self._first[phase])
        return int(self._before[phase, component]) + self._patterns[phase].count(component, rest)

    def choose(self, slots: I64) -> tuple[I64, I64]:
        """See `Pattern.choose`."""
        phases = np.searchsorted(self._first, slots, "right") - 1
        component, nth = np.empty_like(slots), np.empty_like(slots)
        for phase in np.unique(phases).tolist():
            rows = np.flatnonzero(phases == phase)
            chosen, number = self._patterns[phase].choose(slots[rows] - self._first[phase])
            component[rows], nth[rows] = chosen, number + self._before[phase, chosen]
        return component, nth

    def slot(self, component: int, nth: I64) -> I64:
        """See `Pattern.slot`."""
        before = self._before[:, component]
        phases = (
            np.searchsorted(before, nth, "right") - 1
        )  # the last one: those before it have no draw, or another
        slots = np.empty_like(nth)
        for phase in np.unique(phases).tolist():
            rows = np.flatnonzero(phases == phase)
            inside = self._patterns[phase].slot(component, nth[rows] - before[phase])
            slots[rows] = self._first[phase] + inside
        return slots

    def slots_before(self, component: int, nth: int) -> int | None:
        """The slots before a component's nth draw; None where it is not drawn so often."""
        if not self._patterns[-1].shares[component] and nth >= self._before[-1, component]:
            return None
        return int(self.slot(component, np.asarray([nth], np.int64))[0])


def _paths(shares: Sequence[int]) -> list[list[_Split]]:
    """The path through the tree from the root to each component; empty for a single component and for a share of 0."""
    paths: list[list[_Split]] = [[] for _ in shares]
    heap: list[tuple[int, int, tuple[int, ...]]] = [
        (share, index, (index,)) for index, share in enumerate(shares) if share
    ]
    heapify(heap)
    while len(heap) > 1:
        (light, _, lights), (heavy, tie, heavies) = heappop(heap), heappop(heap)
        for members, own, is_left in ((lights, light, True), (heavies, heavy, False)):
            for member in members:
                paths[member].insert(0, _Split(light + heavy, light, own, is_left))
        heappush(heap, (light + heavy, tie, (*lights, *heavies)))
    return paths


def integer_shares(weights: Sequence[float | Fraction]) -> list[int]:
    """Weights as integers in the same proportion, by their decimal notation: .7 and .3 are 7 and 3. Raises InvalidInput
    for a weight below zero, a weight that is not finite, or only zeros."""
    if not weights or any(not math.isfinite(weight) or weight < 0 for weight in weights) or not any(weights):
        raise InvalidInput(f"weights {list(weights)}: give numbers of at least 0, one of them above 0")
    exact = [Fraction(str(weight)) for weight in weights]
    whole = math.lcm(*(one.denominator for one in exact))
    shares = [int(one * whole) for one in exact]
    total = sum(shares) // math.gcd(*shares)
    if total > MAX_PERIOD:
        room, total = MAX_PERIOD - len(shares), sum(shares)
        shares = [max(share * room // total, share > 0) for share in shares]
    divisor = math.gcd(*shares)
    return [share // divisor for share in shares]


def epoch_slots(pattern: Pattern, sizes: Sequence[int], size: Size) -> int:
    """The number of slots of an epoch. `size` is that number, or "total": the number of all components' samples; "first":
    until a component would repeat; "last": until every component has been read once. Raises InvalidInput for anything
    else."""
    if size == "total":
        return sum(sizes)
    drawn = [index for index, share in enumerate(pattern.shares) if share]
    if size == "first":
        return min(int(pattern.slot(index, np.array([sizes[index]]))[0]) for index in drawn)
    if size == "last":
        return max(int(pattern.slot(index, np.array([sizes[index] - 1]))[0]) + 1 for index in drawn)
    if isinstance(size, str):
        raise InvalidInput(
            f"size={size!r}: give a number of samples, 'total', 'first' or 'last'; 'once' with a schedule"
        )
    return whole_number("size", size, 1, MAX_SIZE)


class MixtureRun:
    """One epoch of a mixture: `size` slots of patterns over components of `sizes` samples, after `drawn` draws of each in
    earlier epochs. `run_of(component, own epoch)` is a component's own run. Raises InvalidInput where draws would exceed
    `MAX_DRAWS`."""

    def __init__(
        self,
        draws: Draws,
        size: int,
        sizes: Sequence[int],
        drawn: Sequence[int],
        run_of: Callable[[int, int], Run],
    ) -> None:
        self._draws, self._size, self._sizes, self._drawn = draws, size, sizes, drawn
        most = max(map(sum, zip(drawn, sizes, strict=True))) + size
        if most * len(sizes) > MAX_DRAWS:
            raise InvalidInput(
                f"draw {most:,} of a component, in a mixture of {len(sizes)}: counted to 2^63 together; set a smaller epoch"
            )
        self._make_run = run_of
        self._runs: Latest[tuple[int, int], Run] = Latest(_RUNS_KEPT)

    @property
    def size(self) -> int:
        """Slots of the epoch."""
        return self._size

    def at(self, positions: I64) -> I64:
        """The spots (see `spots_of`) at ascending positions."""
        component, nth = self._draws.choose(positions)
        spots = np.empty_like(positions)
        for index in np.unique(component).tolist():
            rows = np.flatnonzero(component == index)
            own_epoch, at = np.divmod(nth[rows] + self._drawn[index], self._sizes[index])
            inner = np.zeros_like(at)
            # a component of one sample gives it in each epoch of its own
            for epoch in np.unique(own_epoch).tolist() if self._sizes[index] > 1 else ():
                now = own_epoch == epoch
                inner[now] = self._run_of(index, epoch).at(at[now])
            spots[rows] = spots_of(self._sizes, index, own_epoch, inner)
        return spots

    def touches(self) -> list[Touches]:
        """The run positions of the extents of each component."""
        return [self._touches_of(index) for index in range(len(self._sizes))]

    def _touches_of(self, index: int) -> Touches:
        first, count, size = self._drawn[index], self._draws.count(index, self._size), self._sizes[index]
        if not count:
            return Touches(*(np.empty(0, np.int64) for _ in range(3)))
        own_epochs = range(first // size, (first + count - 1) // size + 1)
        if len(own_epochs) > MAX_PASSES:
            extents = np.unique(self._run_of(index, own_epochs[0]).touches()[0].extent)
            return Touches(extents, np.zeros_like(extents), np.full_like(extents, self._size))
        touches = []
        for epoch in own_epochs:
            extent, begin, end = self._run_of(index, epoch).touches()[0]
            begin = np.clip(begin + epoch * size - first, 0, count)
            end = np.clip(end + epoch * size - first, 0, count)
            held = begin < end
            slot = self._draws.slot
            touches.append((extent[held], slot(index, begin[held]), slot(index, end[held] - 1) + 1))
        return Touches(*(np.concatenate(column) for column in zip(*touches, strict=True)))

    def _run_of(self, index: int, own_epoch: int) -> Run:
        return self._runs.get((index, own_epoch), lambda key: self._make_run(*key))


def own_spec(spec: OrderSpec, component: int, components: int) -> OrderSpec:
    """The spec of one component: with a seed of its own, and the samples of it that are excluded. With a common seed, equal
    datasets would run in step."""
    return replace(
        spec, seed=mix(spec.seed, component), excluded=excluded_in(spec.excluded, component, components)
    )


class SpotGroup(NamedTuple):
    """The spots of a component from one of its own epochs: their rows, and the samples `inner` of the component, in the
    order of `spec`."""

    rows: I64
    component: int
    spec: OrderSpec
    own_epoch: int
    inner: I64


def groups_of(sizes: Sequence[int], spots: I64, spec: OrderSpec) -> list[SpotGroup]:
    """Group spots by component and epoch of the component."""
    component, own_epoch, inner = split_spots(sizes, spots)
    found = []
    for index in np.unique(component).tolist():
        mine = component == index
        for epoch in np.unique(own_epoch[mine]).tolist():
            rows = np.flatnonzero(mine & (own_epoch == epoch))
            own = own_spec(spec, index, len(sizes))
            found.append(SpotGroup(rows, index, own, epoch, inner[rows]))
    return found


def spots_of(sizes: Sequence[int], component: int, own_epoch: I64, inner: I64) -> I64:
    """The spots of samples of one component: a mixture's number for (component, own epoch, sample)."""
    return (own_epoch * sizes[component] + inner) * len(sizes) + component


def split_spots(sizes: Sequence[int], spots: I64) -> tuple[I64, I64, I64]:
    """The (component, own epoch, sample) of each spot: the inverse of `spots_of`."""
    draw, component = np.divmod(spots, len(sizes))
    own_epoch, inner = np.divmod(draw, np.asarray(sizes, np.int64)[component])
    return component, own_epoch, inner
