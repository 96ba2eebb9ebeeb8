"""When to try again, when to ask twice, how many at once; clock and chance are arguments."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

LATENCY_SAMPLES = 64
"""Fewer say nothing about a tail; also the most that are kept between two looks at the percentile."""
HEDGE_SHARE = 0.02
"""At most this share of requests is asked twice: the source's load and bill grow by no more."""


def full_jitter_s(attempt: int, chance: float, first_s: float = 0.1, limit_s: float = 20.0) -> float:
    """Seconds to wait after failure number `attempt` (0 first): chance * min(limit, first * 2^attempt).

    `chance` is uniform in [0, 1). "Exponential Backoff And Jitter", AWS Architecture Blog, 2015.
    """
    return chance * min(limit_s, first_s * 2.0 ** min(attempt, 30))


@dataclass(slots=True)
class LatencyTail:
    """A high percentile of recent latencies, kept apart for each power of two of request size."""

    share: float = 0.97
    window: int = 512
    _seen: dict[int, deque[float]] = field(default_factory=dict)
    _since: dict[int, int] = field(default_factory=dict)
    _tail_s: dict[int, float] = field(default_factory=dict)

    def add(self, size_bytes: int, latency_s: float) -> None:
        """Learn one latency."""
        size = size_bytes.bit_length()
        seen = self._seen.setdefault(size, deque(maxlen=self.window))
        seen.append(latency_s)
        self._since[size] = self._since.get(size, 0) + 1
        if self._since[size] >= LATENCY_SAMPLES:
            self._since[size] = 0
            self._tail_s[size] = sorted(seen)[min(len(seen) - 1, int(self.share * len(seen)))]

    def tail_s(self, size_bytes: int) -> float | None:
        """The percentile for requests of this size; None until there are `LATENCY_SAMPLES`."""
        return self._tail_s.get(size_bytes.bit_length())


def hedge_allowed(hedges: int, requests: int) -> bool:
    """Whether one more hedge keeps them within `HEDGE_SHARE` of requests."""
    return hedges + 1 <= HEDGE_SHARE * requests


@dataclass(slots=True)
class Concurrency:
    """How many requests may be under way: additive increase, multiplicative decrease (Chiu and Jain, 1989).

    It halves at most once per `settle_s`, because requests already under way fail together.
    """

    most: int
    least: int = 1
    settle_s: float = 1.0
    _now: float = 0.0
    _halved_at: float | None = None

    def __post_init__(self) -> None:
        self._now = float(self.most)

    @property
    def limit(self) -> int:
        """Requests that may be under way now."""
        return int(self._now)

    def succeeded(self) -> None:
        """One more for about every `limit` answers."""
        self._now = min(float(self.most), self._now + 1.0 / self._now)

    def throttled(self, now: float) -> None:
        """The source said 429 or 503."""
        if self._halved_at is None or now - self._halved_at >= self.settle_s:
            self._halved_at = now
            self._now = max(float(self.least), self._now / 2)
