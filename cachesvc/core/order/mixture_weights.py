"""The weights of a mixture over a run: those that change with an epoch, and those that change at a step or a sample.

Draws of a component are numbered through the run, so an epoch is its own draws, and the numbers that earlier epochs took.

Weights by step count slots in the order of time: every global batch is the next slots of the epoch. So a change at a step
leaves every earlier draw as it is, whatever the weights that follow, and may be made while a run goes on. A batch then is
not made of one part of the run for each canonical node.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np

from cachesvc.core.errors import InvalidInput
from cachesvc.core.order.epoch_order import OrderSpec
from cachesvc.core.order.mixture import (
    MAX_PERIOD,
    Draws,
    Pattern,
    Phases,
    Size,
    epoch_slots,
    integer_shares,
)

By = Literal["proportion", "repeat", "choose"]
MAX_STAGES = 128
"""A linear change is a staircase of at most so many stages: each is off by less than 1/256 of the change."""
_NEVER = 1 << 62
Row = dict[str, Any]


class EpochDraws(NamedTuple):
    """The slots of an epoch, the component that each draws from, and the draws of each component in earlier epochs."""

    draws: Draws
    slots: int
    taken: list[int]


class _EpochPhase(NamedTuple):
    """The pattern and the slots per epoch that hold from epoch `first` on."""

    first: int
    pattern: Pattern
    slots: int


class EpochWeights:
    """Weights that change with an epoch: `schedule` has pairs of a first epoch and the weights from there on. Raises
    InvalidInput."""

    def __init__(
        self,
        sizes: Sequence[int],
        by: By,
        size: Size,
        schedule: tuple[tuple[int, tuple[float, ...]], ...],
    ) -> None:
        self._sizes, self.by, self.size, self.schedule = sizes, by, size, schedule
        self._phases = [self._phase(first, weights) for first, weights in schedule]

    @property
    def length_changes(self) -> tuple[int, ...]:
        """The epochs, ascending, from which epochs may have another length."""
        return tuple(phase.first for phase in self._phases)

    @property
    def slots(self) -> int:
        """The slots of the first epoch; at most, where they depend on the global batch."""
        return self._phases[0].slots

    @property
    def texts(self) -> list[str]:
        """The changes, each as a text that begins with its place: `5:1,1` are equal weights from epoch 5 on. Where weights
        determine the length of an epoch, they are numbers of samples. The first one is the first weights."""
        return [self._text(phase) for phase in self._phases]

    @property
    def row(self) -> Row:
        """The weights as plain values; `weights_of` is the inverse."""
        return {"by": self.by, "size": self.size, "epochs": self.schedule}

    def epoch(self, spec: OrderSpec, number: int) -> EpochDraws:
        """One epoch of a run. Of `spec`, the global batch and `last` count."""
        phase, taken = self._phases[0], [0] * len(self._sizes)
        for following in self._phases[1:]:
            if following.first > number:
                break
            _add(taken, phase.pattern, phase.slots, following.first - phase.first)
            phase = following
        _add(taken, phase.pattern, phase.slots, number - phase.first)
        return EpochDraws(phase.pattern, phase.slots, taken)

    def changed(self, epoch: int, weights: tuple[float, ...]) -> EpochWeights:
        """The same weights until `epoch`, and these from there on. Raises InvalidInput."""
        if epoch <= self.schedule[-1][0]:
            raise InvalidInput(
                f"weights from epoch {epoch}: give an epoch after the latest change, {self.schedule[-1][0]}"
            )
        return EpochWeights(self._sizes, self.by, self.size, (*self.schedule, (epoch, weights)))

    def _text(self, phase: _EpochPhase) -> str:
        times = 1 if self.by == "proportion" else phase.slots // phase.pattern.period
        return f"{phase.first}:{','.join(str(share * times) for share in phase.pattern.shares)}"

    def _phase(self, first: int, weights: Sequence[float]) -> _EpochPhase:
        shares = integer_shares(weights)
        if self.by == "proportion":
            pattern = Pattern(shares)
            slots = epoch_slots(pattern, self._sizes, self.size)
        elif self.by in ("repeat", "choose"):
            if self.by == "choose":
                for weight in weights:
                    if not float(weight).is_integer():
                        raise InvalidInput(f"by='choose' takes whole samples of each dataset, not {weight}")
            scale = self._sizes if self.by == "repeat" else [1] * len(weights)
            counts = [round(weight * samples) for weight, samples in zip(weights, scale, strict=True)]
            slots = sum(counts)
            if not 0 < slots <= MAX_PERIOD or self.size != "total":
                raise InvalidInput(
                    f"by={self.by!r} with weights {list(weights)} makes epochs of {slots} samples: give from 1 to "
                    f"{MAX_PERIOD}, and no `size`"
                )
            pattern = Pattern(counts)
        else:
            raise InvalidInput(f"by={self.by!r}: give 'proportion', 'repeat' or 'choose'")
        if not slots:
            raise InvalidInput(
                f"a mixture with weights {list(weights)} and size={self.size!r} has no samples"
            )
        return _EpochPhase(first, pattern, slots)


class Change(NamedTuple):
    """Weights that hold from step (or sample) `first` of the run on. `linear`: they are reached there, in stages from the
    change before."""

    first: int
    weights: tuple[float, ...]
    linear: bool = False


@dataclass(frozen=True)
class StepWeights:
    """Weights that change at steps of the run, or at samples where `by_sample`. The first of `changes` is at 0.

    `size`: slots of an epoch, or "total" for the number of all components' samples; "first": the first epoch ends where a
    component would repeat, and later ones are as long; "once": each component is read once, and one that has ended drops
    out. A component that had no weight all along is never read; one that has none where all others have ended is.
    `from_start`: the mixture was made with these changes, and not reweighed while its run went on.
    Raises InvalidInput.
    """

    sizes: tuple[int, ...]
    size: Size
    changes: tuple[Change, ...]
    by_sample: bool = False
    from_start: bool = True

    def __post_init__(self) -> None:
        if self.size == "last":
            raise InvalidInput("size='last' does not go with weights that change by step: give size='once'")
        integer_shares(self.changes[0].weights)
        assert self.slots > 0
        for before, change in pairwise(self.changes):
            integer_shares(change.weights)
            if change.first <= before.first:
                raise InvalidInput(
                    f"weights change at {change.first:,} after {before.first:,}: give ascending places, above 0"
                )

    @property
    def length_changes(self) -> tuple[int, ...]:
        """See `EpochWeights`."""
        return ()

    @property
    def slots(self) -> int:
        """See `EpochWeights`."""
        if self.size == "once":
            return sum(size for size, drawn in zip(self.sizes, self.drawn, strict=True) if drawn)
        if self.size == "first":
            return sum(self.sizes)
        return epoch_slots(Pattern([1]), self.sizes, self.size)

    @property
    def by(self) -> By:
        """Weights are relative."""
        return "proportion"

    @property
    def drawn(self) -> list[bool]:
        """Whether each component has a weight at any time."""
        return [any(weights) for weights in zip(*(change.weights for change in self.changes), strict=True)]

    @property
    def texts(self) -> list[str]:
        """The changes: `s5:1,1` are equal weights from step 5 on, `l5:1,1` are reached there. Samples have `x` and `y`."""
        jump, linear = ("x", "y") if self.by_sample else ("s", "l")
        marks = [linear if change.linear else jump for change in self.changes]
        if not self.from_start:
            marks[0] = ""
        return [
            f"{mark}{change.first}:{','.join(map(str, integer_shares(change.weights)))}"
            for mark, change in zip(marks, self.changes, strict=True)
        ]

    @property
    def row(self) -> Row:
        """See `EpochWeights`."""
        names = ("size", "changes", "by_sample", "from_start")
        return {name: getattr(self, name) for name in names}

    def epoch(self, spec: OrderSpec, number: int) -> EpochDraws:
        """See `EpochWeights`."""
        slots = self._epoch_slots(spec)
        stages = self._stages_in_slots(spec, slots)
        draws = self._draws(stages, number, slots)
        if self.size == "once":
            taken = [
                number * size if drawn else 0 for size, drawn in zip(self.sizes, self.drawn, strict=True)
            ]
            return EpochDraws(draws, slots, taken)
        return EpochDraws(draws, slots, self._taken(stages, number, slots))

    def changed(self, change: Change) -> StepWeights:
        """The same weights until a change. Raises InvalidInput."""
        again = StepWeights(self.sizes, self.size, (*self.changes, change), self.by_sample, self.from_start)
        if self.size == "once" and again.drawn != self.drawn:
            raise InvalidInput(
                "size='once': a dataset that had no weight so far would make the epoch longer; make the mixture with all "
                "its changes"
            )
        return again

    @cached_property
    def _stages(self) -> list[tuple[int, Pattern]]:
        """Places in steps or samples, and the pattern from there on."""
        stages = [(0, Pattern(integer_shares(self.changes[0].weights)))]
        for before, change in pairwise(self.changes):
            wide = change.first - before.first
            count = min(wide, MAX_STAGES) if change.linear else 0
            ends = _fractions(before.weights), _fractions(change.weights)
            for stage in range(count):
                part = Fraction(2 * stage + 1, 2 * count)
                between = [low + (high - low) * part for low, high in zip(*ends, strict=True)]
                stages.append((before.first + wide * stage // count, Pattern(integer_shares(between))))
            stages.append((change.first, Pattern(integer_shares(change.weights))))
        return stages

    def _stages_in_slots(self, spec: OrderSpec, slots: int) -> list[tuple[int, Pattern]]:
        """`_stages`, at slots of the run: epochs of `slots` one after another."""
        if self.by_sample:
            return self._stages
        full, rest = divmod(slots, spec.global_batch)
        steps = max(1, full + (rest > 0 and spec.last != "drop"))  # an epoch without steps counts as one
        each = spec.global_batch
        return [(at // steps * slots + at % steps * each, pattern) for at, pattern in self._stages]

    def _epoch_slots(self, spec: OrderSpec) -> int:
        if self.size != "first":
            return self.slots
        each = 1 if self.by_sample else spec.global_batch
        draws = Phases([(at * each, pattern) for at, pattern in self._stages])
        ends = [draws.slots_before(index, size) for index, size in enumerate(self.sizes)]
        return min(end for end in ends if end is not None)

    def _draws(self, stages: list[tuple[int, Pattern]], number: int, slots: int) -> Draws:
        """The draws of an epoch."""
        begin = number * slots
        now = bisect_right(stages, begin, key=lambda stage: stage[0]) - 1
        inside = [(max(0, at - begin), pattern) for at, pattern in stages[now:] if at < begin + slots]
        if self.size == "once":
            return Phases(self._dropping_out(inside, slots))
        return Phases(inside)

    def _dropping_out(self, stages: list[tuple[int, Pattern]], slots: int) -> list[tuple[int, Pattern]]:
        """Stages in which components that have ended have no share."""
        left = [size if drawn else 0 for size, drawn in zip(self.sizes, self.drawn, strict=True)]
        found = []
        ends = [*(at for at, _ in stages[1:]), slots]
        for (at, stage), end in zip(stages, ends, strict=True):
            while at < end:
                some = [share if rest else 0 for share, rest in zip(stage.shares, left, strict=True)]
                pattern = Pattern(some if any(some) else [int(rest > 0) for rest in left])
                room = min(
                    int(pattern.slot(index, np.asarray([rest - 1]))[0]) + 1
                    for index, rest in enumerate(left)
                    if rest and pattern.shares[index]
                )
                room = min(room, end - at)
                found.append((at, pattern))
                left = [rest - pattern.count(index, room) for index, rest in enumerate(left)]
                at += room
        return found

    def _taken(self, stages: list[tuple[int, Pattern]], number: int, slots: int) -> list[int]:
        """The draws of each component in the epochs before one: those in which no weight changes are counted together."""
        taken, epoch = [0] * len(self.sizes), 0
        places = [at for at, _ in stages] + [_NEVER]
        while epoch < number:
            change = places[bisect_right(places, epoch * slots)]
            alike = max(1, min(number, change // slots) - epoch)
            _add(taken, self._draws(stages, epoch, slots), slots, alike)
            epoch += alike
        return taken


def weights_of(sizes: tuple[int, ...], row: Row) -> EpochWeights | StepWeights:
    """The weights of a `row`, of components of these sizes. Raises InvalidInput, and KeyError, TypeError or
    ValueError for a row of other values."""
    if "epochs" in row:
        schedule = tuple((int(first), tuple(weights)) for first, weights in row["epochs"])
        return EpochWeights(sizes, row["by"], row["size"], schedule)
    changes = tuple(
        Change(int(first), tuple(weights), bool(linear)) for first, weights, linear in row["changes"]
    )
    return StepWeights(sizes, row["size"], changes, bool(row["by_sample"]), bool(row["from_start"]))


def _add(taken: list[int], draws: Draws, slots: int, epochs: int) -> None:
    for index in range(len(taken)):
        taken[index] += epochs * draws.count(index, slots)


def _fractions(weights: Sequence[float]) -> list[Fraction]:
    """Weights that sum to 1, by their decimal notation."""
    exact = [Fraction(str(weight)) for weight in weights]
    return [one / sum(exact) for one in exact]
