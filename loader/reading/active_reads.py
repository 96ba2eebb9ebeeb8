"""A read in flight, and the extents that it needs: those extents must not be unmapped or closed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

Ints = np.ndarray[Any, np.dtype[np.int64]]


class ActiveRead:
    """One read in flight: it needs the extents of its ranges, or `extents` once those are known."""

    __slots__ = ("extents", "first", "last")

    def __init__(self, first: Ints, last: Ints) -> None:
        self.first, self.last = first, last
        self.extents: frozenset[int] | None = None

    def needs(self) -> Iterable[int]:
        """The extents that must stay."""
        return touched(self.first, self.last) if self.extents is None else self.extents


def touched(first: Ints, last: Ints) -> list[int]:
    """Every extent that ranges touch, sorted; `first` and `last` are the result of `ExtentReader.spans`."""
    used = set(first.tolist())
    if last is not first:
        used.update(last.tolist())
        for at in np.flatnonzero(last - first > 1).tolist():
            used.update(range(first[at], last[at] + 1))
    return sorted(used)
