"""A circuit breaker for what this node reads from: a source, or another node. Time is an argument."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Trip:
    """When a breaker opens, and how often it lets a probe through.

    It opens after `failures` in a row, over at least `quiet_s`. The first probe follows after `first_s`; the interval
    doubles with each probe, up to `cap_s`.
    """

    failures: int
    quiet_s: float
    first_s: float
    cap_s: float


SOURCE_TRIP = Trip(failures=8, quiet_s=2.0, first_s=0.5, cap_s=8.0)
"""The retries of a single call take six seconds for that many failures."""
PEER_TRIP = Trip(failures=3, quiet_s=0.0, first_s=10.0, cap_s=300.0)
"""A probe of a peer may cost a reader `FILL_LATE_S`, so it is rare."""


@dataclass(slots=True)
class CircuitBreaker:
    """Closed at first. While it is open, one call an interval is a probe, and all others wait for its outcome or go
    elsewhere."""

    trip: Trip = SOURCE_TRIP
    _failures: int = 0
    _since: float = 0.0
    _interval_s: float = 0.0
    _probe_at: float = 0.0

    @property
    def open(self) -> bool:
        """True if what it guards counts as down."""
        return self._interval_s > 0

    @property
    def failing(self) -> bool:
        """True if the last call failed."""
        return self._failures > 0

    def failing_s(self, now: float) -> float:
        """Seconds since the first of the failures in a row; 0 after a call that was answered."""
        return now - self._since if self.failing else 0.0

    def down_s(self, now: float) -> float:
        """Seconds since the first of the failures while it is open; else 0."""
        return now - self._since if self.open else 0.0

    def wait_s(self, now: float) -> float:
        """Seconds until the next probe while it is open; else 0."""
        return max(0.0, self._probe_at - now) if self.open else 0.0

    def ask(self, now: float) -> float:
        """0: make the call, which is the interval's probe while it is open. Otherwise the seconds until the next
        probe."""
        if wait_s := self.wait_s(now):
            return wait_s
        if self.open:
            self._probe_at = now + self._interval_s
            self._interval_s = min(self.trip.cap_s, 2 * self._interval_s)
        return 0.0

    def succeeded(self) -> None:
        """Close it: the call was answered."""
        self._failures, self._interval_s = 0, 0.0

    def failed(self, now: float) -> bool:
        """Count a failure: no answer, a broken one, or one that says that the other side does not work. Return True if it
        opens the breaker."""
        self._failures += 1
        if self._failures == 1:
            self._since = now
        enough = self._failures >= self.trip.failures and now - self._since >= self.trip.quiet_s
        return enough and self.trip_at(now)

    def trip_at(self, now: float) -> bool:
        """Open it at once. Return False where it is open already."""
        if self.open:
            return False
        self._interval_s, self._probe_at = self.trip.first_s, now + self.trip.first_s
        return True
