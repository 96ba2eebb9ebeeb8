"""Work on a million extents, done a step at a time between other events, so that no grant waits for all of it."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from enum import Enum
from typing import TypeVar

Key = tuple["WorkKind", Hashable]
_T = TypeVar("_T")


class WorkKind(Enum):
    """What is done in steps. About a dataset: to claim it or to end its claim, to judge its copies after a pin or an
    unpin, to evict it; about a plan: to pace it, to give up what it passed, to end it."""

    CLAIM = 1
    PIN = 2
    EVICT = 3
    PACE = 4
    END = 5
    PASS = 6


ABOUT_PLANS = frozenset({WorkKind.PACE, WorkKind.END, WorkKind.PASS})


class IncrementalWork:
    """Works under way; each gives way wherever it yields. One for each key. Those about datasets, one after the other,
    and those about plans have every other step; plans take turns, so that neither an opening nor a short plan waits for
    long ones."""

    def __init__(self, size: int) -> None:
        self.size = size
        """How many extents a step may take."""
        self._datasets: dict[Key, Iterator[None]] = {}
        self._plans: dict[Key, Iterator[None]] = {}
        self._plans_next = False

    def begin(self, key: Key, work: Iterator[None]) -> None:
        """Put a work last in line, in place of the one with its key."""
        self.drop(key)
        self._line(key)[key] = work

    def do(self, key: Key, work: Iterator[None], count: int) -> None:
        """Begin a work on so many extents; one step of it is done now."""
        self.begin(key, work)
        if count <= self.size:
            self.finish(key)

    def cut(self, rows: Sequence[_T]) -> Iterator[Sequence[_T]]:
        """Rows, as many at a time as a step may take."""
        return (rows[start : start + self.size] for start in range(0, len(rows), self.size))

    def drop(self, key: Key) -> None:
        """Leave a work as far as it came."""
        self._line(key).pop(key, None)

    def finish(self, key: Key) -> None:
        """Do all that is left of a work now."""
        for _ in self._line(key).pop(key, ()):
            pass

    def advance(self) -> None:
        """Do the next step."""
        line = self._plans if self._plans and (self._plans_next or not self._datasets) else self._datasets
        self._plans_next = line is self._datasets
        for key, work in line.items():
            if next(work, work) is work:
                del line[key]
            elif line is self._plans:
                line[key] = line.pop(key)
            break

    def _line(self, key: Key) -> dict[Key, Iterator[None]]:
        return self._plans if key[0] in ABOUT_PLANS else self._datasets

    def __contains__(self, key: Key) -> bool:
        return key in self._line(key)

    def __bool__(self) -> bool:
        return bool(self._datasets or self._plans)
