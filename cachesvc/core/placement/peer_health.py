"""The health of each place that this node reads extents from: what reads showed, and checks of the port that sends extents.

After a few failures a place is left out, for longer each time, until one read of it, the probe, succeeds. A node whose port
does not answer is not probed before it does. A place that is left out is not asked where extents are, either. A node that
sent wrong bytes is left out at once, and every later read of it is a probe until one has given the source's bytes. Each
node judges by what it sees itself, so a broken link between two nodes does not shut either out of the cluster.

The source is a place too. Only fills that another place then served count against it, since a source that is down for all
nodes is to be asked. What this node tells of its source also follows from the counters of all requests.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

from cachesvc.core.placement.directory import SOURCE
from cachesvc.core.placement.place_search import Verdict
from cachesvc.core.rates.circuit_breaker import PEER_TRIP, CircuitBreaker, Trip

RATE_SHARE = 0.2
"""The part of the latest read in the rate that is shown."""
RATE_LEAST_BYTES = 65536
"""A read of fewer bytes says nothing about the rate."""
REQUESTS_TRIP = Trip(failures=1, quiet_s=10.0, first_s=1.0, cap_s=1.0)
"""The source fails once requests to it have been repeated for so long and no byte came."""
ALONE_S, ALONE_UNTIL_S = 10.0, 600.0
"""The source fails, too, in this time after a fill that it did not give and another place did, unless it gave one since.
Later, one late fill says little about the source of an idle node."""
THROTTLES_S = 10.0
"""The time after an answer that asked for fewer requests in which the source counts as throttling."""
Health = Literal["works", "slow", "unreadable", "wrong"]
"""`slow`: its extents come too late. `unreadable`: the port that sends them does not answer, or breaks off. `wrong`: it
sent other bytes than the source has."""
Source = Literal["", "works", "throttles", "slow", "fails"]
"""How a node's sources answer it; "": it has not asked them. `slow`: the last read was late or failed, and another place
gave the extent. `fails`: three times in a row, or once, `ALONE_S` to `ALONE_UNTIL_S` ago, and it gave none since."""


@dataclass(slots=True)
class PlaceHealth:
    """One place. Times are seconds of the caller's clock."""

    breaker: CircuitBreaker
    unreachable: bool = False
    """The way to it is broken, as far as the last read or check of its port tells."""
    wrong: bool = False
    """It sent other bytes than the source has, and none since then that were compared and right."""
    failures: int = 0
    why: str = ""
    """The last failure, as text for people."""
    bytes_per_s: float = 0.0
    """The rate of one read, smoothed; 0 before the first."""
    round_trip_s: float = 0.0
    """What the last check of its port took."""

    def state(self, now: float) -> Health:
        """Return whether it works, and why not. A slow place counts as working when a probe is due."""
        if not self.breaker.open:
            return "works"
        if self.unreachable:
            return "unreadable"
        if self.wrong:
            return "wrong"
        return "slow" if self.breaker.wait_s(now) else "works"

    def left_out(self, now: float) -> bool:
        """Return whether nothing is to be read from it now, not even as a probe."""
        return self.breaker.open and (self.unreachable or self.breaker.wait_s(now) > 0)


@dataclass(slots=True)
class PlacesHealth:
    """All places by name; the source of this node is `SOURCE`."""

    trip: Trip = PEER_TRIP
    _places: dict[str, PlaceHealth] = field(default_factory=dict)
    _requests: CircuitBreaker = field(default_factory=lambda: CircuitBreaker(REQUESTS_TRIP))
    _counted: tuple[int, int, int] = (0, 0, 0)
    _throttled_at: float = -math.inf

    def of(self, node: str) -> PlaceHealth:
        """Return the record of a place."""
        return self._places.setdefault(node, PlaceHealth(CircuitBreaker(self.trip)))

    def left_out(self, now: float) -> list[str]:
        """The places from which nothing is to be read now."""
        return [node for node, each in self._places.items() if each.left_out(now)]

    def begin(self, node: str, now: float) -> bool:
        """Return whether a read from a place may begin, which may be its probe."""
        place = self._places.get(node)
        if place is None or not place.breaker.open:
            return True
        return not place.unreachable and not place.breaker.ask(now)

    def judge(self, verdict: Verdict, now: float) -> None:
        """Take a read's verdict."""
        place = self.of(verdict.node)
        if verdict.wrong:
            place.failures += 1
            place.why, place.wrong = verdict.failure, True
            place.breaker.trip_at(now)
            return
        if verdict.failure:
            place.failures += 1
            place.why, place.unreachable = verdict.failure, verdict.unreachable
            place.breaker.failed(now)
            return
        if verdict.size_bytes >= RATE_LEAST_BYTES and verdict.took_s > 0:
            rate = verdict.size_bytes / verdict.took_s
            place.bytes_per_s += (RATE_SHARE if place.bytes_per_s else 1.0) * (rate - place.bytes_per_s)
        place.unreachable = False
        if verdict.compared or not place.wrong:
            place.breaker.succeeded()
            place.wrong = False

    def source(self, size_bytes: int, retries: int, throttled: int, now: float) -> Source:
        """Take the counters of all requests to the source; return how it answers this node."""
        bytes_before, retries_before, throttled_before = self._counted
        self._counted = size_bytes, retries, throttled
        if throttled > throttled_before:
            self._throttled_at = now
        if size_bytes > bytes_before:
            self._requests.succeeded()
        elif retries > retries_before:
            self._requests.failed(now)
        place = self.of(SOURCE).breaker
        if self._requests.open or place.open or ALONE_S <= place.failing_s(now) < ALONE_UNTIL_S:
            return "fails"
        if place.failing:
            return "slow"
        throttles = now - self._throttled_at < THROTTLES_S
        return "" if not size_bytes else "throttles" if throttles else "works"

    def answered(self, node: str, round_trip_s: float) -> None:
        """Note that a port that sends extents answered a check."""
        place = self.of(node)
        place.round_trip_s, place.unreachable = round_trip_s, False

    def silent(self, node: str, why: str, now: float) -> None:
        """Note that it did not, and leave the node out."""
        place = self.of(node)
        place.failures += 1
        place.why, place.unreachable = why, True
        place.breaker.trip_at(now)

    def reset(self, node: str) -> None:
        """Forget one place, unless it sent wrong bytes: the memory of a machine does not mend in a restart."""
        if node in self._places and not self._places[node].wrong:
            del self._places[node]

    def forget(self, members: Collection[str]) -> None:
        """Forget all but these nodes and the source."""
        for node in self._places.keys() - {*members, SOURCE}:
            del self._places[node]
