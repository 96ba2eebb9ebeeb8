"""Work on a million extents, done in steps between other events, so that no grant waits for all of it."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from enum import Enum
from typing import TypeVar

Key = tuple["WorkKind", Hashable]
_T = TypeVar("_T")


class WorkKind(Enum):
    """Kinds of work. On a dataset: CLAIM claims it or ends its claim, PIN reassesses its copies after a pin or an
    unpin, EVICT evicts it, PLACE reassesses its copies after the cluster changed. On a plan: PACE schedules it,
    PASS gives up the rows that it passed, END ends it."""

    CLAIM = 1
    PIN = 2
    EVICT = 3
    PACE = 4
    END = 5
    PASS = 6
    PLACE = 7


ON_PLANS = frozenset({WorkKind.PACE, WorkKind.END, WorkKind.PASS})


class IncrementalWork:
    """Work under way, one iterator for each key; a step runs to its next yield. Work on datasets, one after the other, and
    work on plans have every other step. Plans are served round robin. So neither the opening of a dataset nor a short
    plan waits for long plans."""

    def __init__(self, size: int) -> None:
        self.size = size
        """The most extents of one step."""
        self._datasets: dict[Key, Iterator[None]] = {}
        self._plans: dict[Key, Iterator[None]] = {}
        self._plans_next = False

    def begin(self, key: Key, work: Iterator[None]) -> None:
        """Add work as the last in line, in place of the work with its key."""
        self.drop(key)
        self._line(key)[key] = work

    def do(self, key: Key, work: Iterator[None], count: int) -> None:
        """Begin work on `count` extents; where one step is enough, do it now."""
        self.begin(key, work)
        if count <= self.size:
            self.finish(key)

    def cut(self, rows: Sequence[_T]) -> Iterator[Sequence[_T]]:
        """Rows, in runs of at most a step's length."""
        return (rows[start : start + self.size] for start in range(0, len(rows), self.size))

    def drop(self, key: Key) -> None:
        """Abandon work where it is."""
        self._line(key).pop(key, None)

    def finish(self, key: Key) -> None:
        """Do the rest of some work now."""
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
        return self._plans if key[0] in ON_PLANS else self._datasets

    def __contains__(self, key: Key) -> bool:
        return key in self._line(key)

    def __bool__(self) -> bool:
        return bool(self._datasets or self._plans)
