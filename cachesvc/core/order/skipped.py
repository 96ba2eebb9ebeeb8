"""Data steps that a run leaves out for good, and the numbers of its steps.

A *data step* is a global batch, counted through all epochs of a run from 0. A run may skip ranges of them. The steps that
it trains are numbered without those: data step d is trained step d - (skipped ones below d).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

import numpy as np

from cachesvc.core.arguments import whole_number
from cachesvc.core.errors import InvalidInput
from cachesvc.core.order.permute import I64

MAX_RANGES = 1000
"""Ranges of steps in one run: a state names each."""
_MOST = 2**63 - 1


class Skipped:
    """Half-open ranges of steps that are left out, disjoint and ascending. Immutable. Steps that are kept are numbered from
    0 without the skipped ones."""

    __slots__ = ("_before", "begins", "ends")

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        """Overlapping ranges are merged, and empty ones dropped."""
        merged: list[list[int]] = []
        for begin, end in sorted(each for each in ranges if each[0] < each[1]):
            if merged and begin <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], end)
            else:
                merged.append([begin, end])
        self.begins = np.array([begin for begin, _ in merged], np.int64)
        self.ends = np.array([end for _, end in merged], np.int64)
        self._before = np.concatenate(([0], np.cumsum(self.ends - self.begins))).astype(np.int64)

    def __bool__(self) -> bool:
        return self.begins.size > 0

    def __contains__(self, step: int) -> bool:
        at = int(np.searchsorted(self.ends, step, side="right"))
        return at < self.begins.size and bool(self.begins[at] <= step)

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """The ranges as pairs of numbers."""
        return [*zip(self.begins.tolist(), self.ends.tolist(), strict=True)]

    @property
    def text(self) -> str:
        """The ranges as a state has them, e.g. `5000:5100,7000:7001`; "" for none."""
        return ",".join(f"{begin}:{end}" for begin, end in self.ranges)

    def within(self, first: int, steps: int) -> Skipped:
        """The ranges within the steps [first, first + steps), counted from `first`."""
        clipped = ((max(begin - first, 0), min(end - first, steps)) for begin, end in self.ranges)
        return Skipped(clipped)

    def numbers(self, steps: I64) -> I64:
        """The numbers, among the kept steps, of the first kept step at or after each of `steps`."""
        at = np.searchsorted(self.ends, steps, side="right")
        begun = np.zeros_like(steps)
        inside = at < self.begins.size
        begun[inside] = np.maximum(steps[inside] - self.begins[at[inside]], 0)
        return steps - self._before[at] - begun

    def steps(self, numbers: I64) -> I64:
        """The steps of kept ones, by their numbers: the inverse of `numbers`."""
        kept_before = self.begins - self._before[:-1]
        return numbers + self._before[np.searchsorted(kept_before, numbers, side="right")]

    def number(self, step: int) -> int:
        """`numbers` for one step."""
        return int(self.numbers(np.array([step], np.int64))[0])

    def step(self, number: int) -> int:
        """`steps` for one number."""
        return int(self.steps(np.array([number], np.int64))[0])


NONE_SKIPPED = Skipped()


@lru_cache(64)
def parse_skipped(text: str) -> Skipped:
    """The inverse of `Skipped.text`. Raises InvalidInput for anything else."""
    pairs = [each.split(":") for each in text.split(",")] if text else []
    if not all(len(pair) == 2 and all(end.isascii() and end.isdigit() for end in pair) for pair in pairs):
        raise InvalidInput(f"skipped steps {text[:80]!r}: write ranges as 5000:5100,7000:7001")
    found = Skipped(_checked((int(begin), int(end)) for begin, end in pairs))
    if found.text != text:
        raise InvalidInput(f"skipped steps {text[:80]!r} do not ascend, overlap or are empty")
    return found


def skipped_by(ranges: object) -> Skipped:
    """The steps that a caller names as `range` objects of step 1 or pairs (begin, end). Raises InvalidInput."""
    if isinstance(ranges, (str, bytes)) or not isinstance(ranges, Iterable):
        raise InvalidInput(f"skip_steps={ranges!r}: give a list of ranges, such as [range(5000, 5100)]")
    return Skipped(_checked(map(_bounds, ranges)))


def _bounds(given: object) -> tuple[int, int]:
    if isinstance(given, range) and given.step == 1:
        return given.start, given.stop
    if isinstance(given, (tuple, list)) and len(given) == 2:
        return (
            whole_number("skip_steps", given[0], 0, _MOST),
            whole_number("skip_steps", given[1], 0, _MOST),
        )
    raise InvalidInput(
        f"skip_steps has {given!r}: give ranges of consecutive steps, such as range(5000, 5100)"
    )


def _checked(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    found = list(ranges)
    for begin, end in found:
        if not 0 <= begin < end <= _MOST:
            raise InvalidInput(f"steps {begin}:{end}: a range begins at 0 or later, and ends after it begins")
    if len(found) > MAX_RANGES:
        raise InvalidInput(f"{len(found):,} ranges of skipped steps: {MAX_RANGES:,} are the most")
    return found


class RunSteps:
    """Numbers the data steps of a run. From `since_epoch` on, which begins with data step `since_step`, the run has one
    order. Epoch e has `steps_of(e)` steps, and all have as many between two of `changes`, ascending epochs."""

    def __init__(
        self, since_epoch: int, since_step: int, changes: Sequence[int], steps_of: Callable[[int], int]
    ) -> None:
        self._since_step, self._steps_of = since_step, steps_of
        firsts = [since_epoch, *(each for each in changes if each > since_epoch)]
        self._phases = [*zip(firsts, [*firsts[1:], _MOST], strict=True)]

    def first(self, epoch: int) -> int:
        """The first data step of an epoch. Epochs before `since_epoch` count back as if the order had been the same, at
        most to step 0: global batches may have been larger before."""
        found = self._since_step
        if epoch < self._phases[0][0]:
            return max(0, found - (self._phases[0][0] - epoch) * self._steps_of(epoch))
        for begin, end in self._phases:
            if begin >= epoch:
                break
            found += (min(epoch, end) - begin) * self._steps_of(begin)
        return found

    def place(self, step: int) -> tuple[int, int] | None:
        """The epoch of a data step and its number in it; None where no epoch has it."""
        rest = step - self._since_step
        for begin, end in self._phases:
            steps = self._steps_of(begin)
            if 0 <= rest < (end - begin) * steps:
                return begin + rest // steps, rest % steps
            rest -= (end - begin) * steps
        return None
