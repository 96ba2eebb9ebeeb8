"""Decides when to retry, when a read is late and how fast to ask. Time and randomness are arguments."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field, fields
from operator import attrgetter

from cachesvc.core.limits import RETRY_CAP_S, RETRY_FIRST_S

LATENCY_SAMPLES = 64
"""Fewer samples say nothing about a tail."""
LATE_READ = 1.5
"""A read is late after so many times the tail. So of reads that a source serves as usual few take from the budget."""
LEAST_LATE_S = 0.05
"""No read is late before: look-ahead covers a shorter delay, and a busy node causes it itself."""


def backoff_s(attempt: int, first_s: float = RETRY_FIRST_S, cap_s: float = RETRY_CAP_S) -> float:
    """The most seconds to wait after failure number `attempt` (0 first): min(cap, first * 2^attempt).

    Times a chance, uniform in [0, 1), it has full jitter ("Exponential Backoff And Jitter", AWS Architecture Blog, 2015).
    """
    return min(cap_s, first_s * 2.0 ** min(attempt, 30))


def late_s(tail_s: float) -> float:
    """The time after which a read is late, in seconds."""
    return max(LEAST_LATE_S, LATE_READ * tail_s)


@dataclass(slots=True)
class LatencyTail:
    """A percentile of recent latencies, by default a high one, for each power of two of request size. It is computed again
    after `least` new samples."""

    share: float = 0.97
    window: int = 512
    least: int = LATENCY_SAMPLES
    _seen: dict[int, deque[float]] = field(default_factory=dict)
    _since: dict[int, int] = field(default_factory=dict)
    _tail_s: dict[int, float] = field(default_factory=dict)

    def add(self, size_bytes: int, latency_s: float) -> None:
        """Add one latency."""
        size = size_bytes.bit_length()
        seen = self._seen.setdefault(size, deque(maxlen=self.window))
        seen.append(latency_s)
        self._since[size] = self._since.get(size, 0) + 1
        if self._since[size] >= self.least:
            self._since[size] = 0
            self._tail_s[size] = sorted(seen)[min(len(seen) - 1, int(self.share * len(seen)))]

    def tail_s(self, size_bytes: int) -> float | None:
        """The percentile for requests of this size; None until there are `least` samples."""
        return self._tail_s.get(size_bytes.bit_length())


@dataclass(slots=True)
class Pace:
    """The rate of requests that a source accepts, learned from its refusals. There is no limit before the first refusal.

    A limit on concurrency alone cannot do this: where an answer takes 1 ms, one request at a time is a thousand a second.
    So the rate grows by addition, and a refusal cuts it by multiplication, as TCP does (Chiu and Jain, 1989). Slow start
    finds the rate at first, and again after most requests were refused. Each node does so by itself; its refusals tell it
    of the others.

    `CLOSED` refusals in a row with a Retry-After, or one before any answer, mean that the source is closed, as when a quota
    is used up. Then all requests wait until it opens. A single refusal with a Retry-After only cuts the rate: others are
    still served.

    A cut must be seen to work before the next, however long answers take (a slow source, a process without a core): (1)
    places in the queue are served at the current rate, not at that of the time when they were taken; (2) only answers to
    requests sent since the last cut count, over `SETTLE_S` and `SETTLE_REQUESTS` at least. Otherwise each late refusal of
    an earlier request would cut again, down to nothing.
    """

    CUT = 0.9
    CUT_CLOSED = 0.7
    """What is left of the rate after a cut, and where a source closes. A deeper cut makes a quota close less often."""
    GROWTH = 0.03
    """Growth a second, as a part of the rate after the cut."""
    SETTLE_S = 1.0
    SETTLE_REQUESTS = 16
    LEAST_RATE = 0.2
    CLOSED = 2
    CLOSED_AT_FIRST = 8
    """The same before the first cut, when the rate is a guess, and half of the requests may be refused."""
    CALM_S = 60.0
    """The time of growth without a refusal from which the rate doubles every second: the source has more to give."""
    MOST_DOUBLINGS = 24
    """So often doubled, a rate is no limit."""
    LOOK_S = 1e-3
    """The least time between two checks of a place in the queue."""
    _base: float = math.inf
    """The rate after the last cut."""
    _knee: float = math.inf
    """Slow start ends here."""
    _cut_at: float = -math.inf
    _paused_until: float = -math.inf
    _in_a_row: float = 0
    """Requests refused in a row since the last answer."""
    _last: float = 0.0
    """The last place in the queue."""
    _due: float = 0.0
    """Places up to this one may ask; it advances at the rate."""
    _due_at: float = -math.inf
    served_at: float = -math.inf
    """When the source answered last."""
    _since: float = -math.inf
    """When the first answer since the last cut came."""
    _counted_at: float = -math.inf
    _accepted: float = 0
    _asked: float = 0
    """Answers since the last cut; they decay over the settling time."""
    most: float = math.inf
    """The limit of the rate that the settings give."""

    def numbers(self) -> tuple[float, ...]:
        """The state as numbers: `Pace(*numbers)` goes on with it."""
        return _NUMBERS(self)

    def rate(self, now: float) -> float:
        """Requests a second; inf where there is no limit. After a cut, or the pause that followed it, it doubles every
        second up to the knee, and grows by `GROWTH` from there. It is never above `most`."""
        return min(self.most, self._learned_rate(now))

    def _learned_rate(self, now: float) -> float:
        if math.isinf(self._base):
            return math.inf
        quiet_s = max(0.0, now - max(self._cut_at, self._paused_until))
        start_s = math.log2(max(1.0, self._knee / self._base))
        steady_s = max(0.0, quiet_s - start_s)
        doublings = min(quiet_s, start_s) + max(0.0, steady_s - self.CALM_S)
        if doublings > self.MOST_DOUBLINGS:
            return math.inf
        return self._base * math.pow(2.0, doublings) * (1 + self.GROWTH * steady_s)

    def join(self, now: float, places: int = 1) -> float:
        """Take places in the queue, and return the first, for `wait_s`. A caller that leaves early wastes them."""
        self._move(now)
        self._last += places
        return self._last - places + 1

    def wait_s(self, place: float, now: float) -> float:
        """Seconds after which to call again; 0: the place may ask now. They end before the place is due, unless the
        rate doubles before: otherwise all places that are due early would ask at once."""
        self._move(now)
        rate, before = self.rate(now), max(0.0, place - self._due)
        if not before or math.isinf(rate):
            return self.paused_s(now)
        return self.paused_s(now) + max(self.LOOK_S, math.log2(1 + math.log(2) * before / rate))

    def paused_s(self, now: float) -> float:
        """Seconds until the end of the pause that the source asked for."""
        return max(0.0, self._paused_until - now)

    def accepted(self, sent_at: float, now: float) -> None:
        """Count an answer to a request sent at `sent_at`. The error that an object is missing is an answer too."""
        self.served_at = now
        if sent_at >= self._cut_at:
            self._count(now, accepted=1)
            self._in_a_row = 0

    def refused(self, sent_at: float, now: float, retry_after_s: float) -> None:
        """Count a refusal (429 or 503), with its Retry-After or 0, and cut the rate or begin a pause."""
        self._move(now)
        if sent_at < self._cut_at:
            return
        self._count(now, accepted=0)
        self._in_a_row += 1
        rate, settle_s = self.rate(now), self._settle_s(now)
        span_s = max(self.SETTLE_S, settle_s * (1 - math.exp((self._since - now) / settle_s)))
        closed = self.CLOSED_AT_FIRST if math.isinf(self._knee) else self.CLOSED
        if retry_after_s > 0 and self._in_a_row >= closed:
            self._base = max(self.LEAST_RATE, self.CUT_CLOSED * self._base)
            self._paused_until, self._in_a_row = now + retry_after_s, 0
        elif math.isinf(rate):
            self._base, self._knee = max(1.0, self._accepted) / span_s, math.inf
            if not self._accepted:
                self._paused_until = now + retry_after_s
        elif now - self._cut_at >= settle_s and (self._in_a_row == 1 or not retry_after_s):
            used = min(rate, max(self._base, self._asked / span_s))
            self._base = max(self.LEAST_RATE, used * min(self.CUT, self._accepted / self._asked))
            if self._accepted:  # otherwise it was an outage, and the former rate may still be right
                self._knee = used / 2
        else:
            return
        self._cut_at = now
        self._accepted = self._asked = 0

    def _settle_s(self, now: float) -> float:
        return max(self.SETTLE_S, self.SETTLE_REQUESTS / self.rate(now))

    def _count(self, now: float, accepted: int) -> None:
        if not self._asked:
            self._since = self._counted_at = now
        left = math.exp((self._counted_at - now) / self._settle_s(now))
        self._accepted, self._asked = self._accepted * left + accepted, self._asked * left + 1
        self._counted_at = now

    def _move(self, now: float) -> None:
        """Advance the queue to now. Of the places that were not taken while it was empty, one is left."""
        rate, since = self.rate(now), max(self._due_at, min(now, self._paused_until))
        if now > since:
            self._due = min(self._last + 1, self._due + rate * (now - since))
        self._due_at = now


_NUMBERS = attrgetter(*(each.name for each in fields(Pace)))
