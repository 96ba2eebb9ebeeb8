"""The search of one fill for a place that gives its extent: how long it waits for each place, and what it learns of them.

A fill asks the extent's owner, and reads from the node or the source that the owner names. A read that takes longer than
fills of that size usually do is *late*. Then the fill asks again, and is sent elsewhere. A place is blamed only when
another place then gave the extent in time: where the source is slow for all, nobody is at fault.

Where a node is late that fetches the extent from the source itself, asking the source too is a *hedge*: the bytes may leave
the source twice. `Hedges` limits them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from cachesvc.core.limits import FILL_LATE_S
from cachesvc.core.model import ExtentId
from cachesvc.core.placement.directory import SOURCE
from cachesvc.core.rates.backoff import LatencyTail
from cachesvc.core.rates.hedge_budget import HedgeBudget

MAX_NODES = 4
"""Nodes that a fill reads from, one after the other, before it reads from the source."""
LATE_FACTOR = 3.0
"""A read is late after so many times the usual time of a fill."""
SOURCE_FACTOR = 1.4
"""A fill that reads the source itself waits so much longer than those that follow it. So one of these reads the source
before the fill asks, and is named to it."""
LEARNED_FILLS = 3
"""Fewer fills say nothing about the usual time."""
MOST_DOUBLINGS = 4
"""Each time that all places are late the patience doubles. After so many times the source has its own time limits."""


class ReadEnd(Enum):
    """How a read from a node or from the source ended."""

    GAVE = "gave"
    """All bytes came."""
    LACKS = "lacks"
    """A node that works does not have the extent, or gave up its own fill of it."""
    FAILED = "failed"
    """The node cannot be reached, broke off, or sent wrong bytes; the source answered with an error."""
    LATE = "late"
    """The bytes did not come in time."""
    WRONG = "wrong"
    """A node sent other bytes than the source has."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a read may take: `wait_s` without progress, `limit_s` in all. Infinite for no limit."""

    wait_s: float = math.inf
    limit_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a read from a place: it gave `size_bytes` in `took_s`, or `failure` says what is wrong with it.
    `unreachable`: the way to it is broken, rather than slow. `compared`: what it gave equals the source's bytes; `wrong`:
    it does not."""

    node: str
    size_bytes: int = 0
    took_s: float = 0.0
    failure: str = ""
    unreachable: bool = False
    compared: bool = False
    wrong: bool = False


@dataclass(frozen=True, slots=True)
class LateRead:
    """A read that was late. `filling`: its node was fetching the extent itself. `came_bytes`: what came of it. `throttled`:
    the source refused a request of this node meanwhile, or requests cost this node's user money."""

    now: float
    filling: bool = False
    came_bytes: int = 0
    throttled: bool = False


class FillTimes:
    """The usual time of a fill, by the size of its extent: the median of the last ones."""

    def __init__(self) -> None:
        self._latencies = LatencyTail(share=0.5, window=64, least=LEARNED_FILLS)

    def add(self, size_bytes: int, took_s: float) -> None:
        """Add a fill from the source, or from a node that was fetching the extent itself."""
        self._latencies.add(size_bytes, took_s)

    def late_s(self, size_bytes: int) -> float:
        """The time after which a fill without progress is late, in seconds."""
        return max(FILL_LATE_S, LATE_FACTOR * (self._latencies.tail_s(size_bytes) or 0.0))

    def limit_s(self, size_bytes: int) -> float:
        """The time after which a fill is late although it makes progress, in seconds; infinite where the usual time is not
        known."""
        return math.inf if self._latencies.tail_s(size_bytes) is None else self.late_s(size_bytes)


class Budget(Protocol):
    """A `HedgeBudget`, perhaps shared with others."""

    def fits(self, size_bytes: int) -> bool:
        """Return whether so many bytes are left."""
        ...

    def spend(self, size_bytes: int) -> None:
        """Take bytes out of the budget."""
        ...


@dataclass(slots=True)
class Hedges:
    """Decides whether a fill asks the source for an extent that a late node is fetching from there.

    Bytes that come twice are of the node's budget of hedges. A node that has no byte at all costs none twice, where this
    node has bytes from the source at the same time. None is asked twice while the source gives this node nothing.
    """

    budget: Budget = field(default_factory=HedgeBudget)
    _reading: dict[ExtentId, float] = field(default_factory=dict)
    """The reads of the source under way, and when each began."""
    _gave_at: float = -math.inf

    def began(self, extent: ExtentId, now: float) -> None:
        """Note that this node reads an extent from the source."""
        self._reading[extent] = now

    def moved(self, extent: ExtentId, now: float) -> None:
        """Note the progress of a fill, from whichever place."""
        if extent in self._reading:
            self._gave_at = now

    def ended(self, extent: ExtentId, gave: bool, now: float) -> None:
        """Note the end of a read of the source, and whether it gave the extent."""
        self._reading.pop(extent, None)
        if gave:
            self._gave_at = now

    def silent(self, now: float, late_s: float) -> bool:
        """Return whether the source gives this node nothing: it was asked half of `late_s` ago, and has sent nothing since
        then."""
        since = now - late_s / 2
        return self._gave_at < since and any(began <= since for began in self._reading.values())

    def allows(self, size_bytes: int, late: LateRead, late_s: float) -> bool:
        """Return whether a fill may ask the source, `late_s` after it began to follow a node."""
        if self.silent(late.now, late_s):
            return False
        return not late.came_bytes or (self.budget.fits(size_bytes) and not late.throttled)


class PlaceSearch:
    """One fill's search. `failed` and `late` go with its next question to the owner."""

    def __init__(self, size_bytes: int, times: FillTimes, hedges: Hedges, source_failed: str = "") -> None:
        """`source_failed`: how the source failed in the fill before, which this one repeats."""
        self._size_bytes, self._times, self._hedges = size_bytes, times, hedges
        self.failed: list[str] = []
        """Places that failed; never asked again."""
        self.late: list[str] = []
        """Places that were late: not asked now."""
        self._suspects = {SOURCE: source_failed} if source_failed else {}
        """Places that were late, or the source that failed, and how."""
        self._came_bytes: int | None = None
        """What the late node gave that fetches the extent itself; None without one."""
        self._nodes = self._doublings = self._source_lates = 0

    @property
    def exhausted(self) -> bool:
        """Only the source is left, for as long as it takes."""
        return self._nodes >= MAX_NODES or self._source_lates >= MOST_DOUBLINGS

    @property
    def hedging(self) -> bool:
        """To read the source now is a hedge."""
        return self._came_bytes is not None

    def begin(self, node: str) -> Patience:
        """Begin to read from a place. Return how long the read may take."""
        if node == SOURCE and self._came_bytes:
            self._hedges.budget.spend(self._size_bytes)
        self._came_bytes = None
        if self.exhausted:
            return Patience()
        factor = 2.0 ** min(self._doublings, MOST_DOUBLINGS)
        late_s = factor * self._times.late_s(self._size_bytes)
        if node == SOURCE:
            return Patience(SOURCE_FACTOR * late_s)
        return Patience(late_s, factor * self._times.limit_s(self._size_bytes))

    def gave(
        self, node: str, filling: bool, came_bytes: int, took_s: float, compared: bool = False
    ) -> list[Verdict]:
        """End the search: a place gave the rest. `filling`: it was fetching the extent itself. `compared`: its bytes equal
        the source's."""
        in_time = took_s <= self._times.late_s(self._size_bytes)
        blamed = [(name, why) for name, why in self._suspects.items() if in_time and name != node]
        if node == SOURCE or filling:
            self._times.add(self._size_bytes, took_s)
        gave = Verdict(node, came_bytes, took_s, compared=compared)
        return [gave, *(Verdict(name, failure=why) for name, why in blamed)]

    def failed_at(self, node: str, why: str, end: ReadEnd) -> list[Verdict]:
        """Note a place that does not give the extent."""
        self._nodes += node != SOURCE
        self.failed.append(node)
        if node == SOURCE:
            self._suspects[node] = why
        elif end is ReadEnd.FAILED:
            return [Verdict(node, failure=why, unreachable=True)]
        return []

    def late_at(self, node: str, why: str, late: LateRead) -> None:
        """Note a place that is late, and leave it out of the next question. A node is not left out where asking the source
        would be a hedge too many; then it gets twice the time."""
        late_s = self._times.late_s(self._size_bytes)
        if late.filling and not self._hedges.allows(self._size_bytes, late, late_s):
            self._doublings += 1
            return
        self.late = [each for each in self.late if each != SOURCE]  # all others are late: it is asked again
        if node == SOURCE:
            self._source_lates += 1
            self._doublings += 1
        else:
            self._nodes += 1
            self._came_bytes = late.came_bytes if late.filling else None
        if node in self._suspects and node != SOURCE:
            self.failed.append(node)
        self._suspects[node] = why
        self.late.append(node)
