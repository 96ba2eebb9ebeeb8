"""Decides when to retry, when to hedge, how fast to ask, and when to stop asking. Time and randomness are arguments."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field, fields
from operator import attrgetter

LATENCY_SAMPLES = 64
"""Fewer samples say nothing about a tail. The percentile is computed again after as many new ones."""
HEDGE_SHARE = 0.02
"""The most requests that are hedged, as a part of all: the source's load and bill grow by no more."""


def full_jitter_s(attempt: int, chance: float, first_s: float = 0.1, limit_s: float = 8.0) -> float:
    """Seconds to wait after failure number `attempt` (0 first): chance * min(limit, first * 2^attempt).

    `chance` is uniform in [0, 1). "Exponential Backoff And Jitter", AWS Architecture Blog, 2015.
    """
    return chance * min(limit_s, first_s * 2.0 ** min(attempt, 30))


@dataclass(slots=True)
class LatencyTail:
    """A high percentile of recent latencies, for each power of two of request size."""

    share: float = 0.97
    window: int = 512
    _seen: dict[int, deque[float]] = field(default_factory=dict)
    _since: dict[int, int] = field(default_factory=dict)
    _tail_s: dict[int, float] = field(default_factory=dict)

    def add(self, size_bytes: int, latency_s: float) -> None:
        """Add one latency."""
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
    """Return whether one more hedge keeps hedges within `HEDGE_SHARE` of requests."""
    return hedges + 1 <= HEDGE_SHARE * requests


@dataclass(slots=True)
class Pace:
    """The rate of requests that a source accepts, learned from its refusals. There is no limit before the first refusal.

    A limit on concurrency alone cannot do this: where an answer takes 1 ms, one request at a time is a thousand a second.
    So a refusal cuts the rate by the part of requests that were refused, by 5 % at least and by half at most. From there
    the rate grows as in `rate`: slowly around the limit just found, then ever faster, for the limit itself may have moved
    (the idea of CUBIC, Ha et al., 2008). Each node does so by itself; its refusals tell it of the others.

    `CLOSED` refusals in a row with a Retry-After mean that a quota is used up, not that a rate is exceeded. Then all
    requests wait until the source opens again, and go on at what was accepted since it opened last, divided by the time
    between the two openings. So a quota for a minute is used all through the minute, and few requests are refused. Once
    the time between two openings is known, the rate grows over such times, not over seconds, and a single refusal is
    believed that names a small part of it, for that costs little.

    A client that is refused twice with a Retry-After stays away so long: the others may then be served at a rate far below
    this one. So such a cut leaves no more than what was accepted a second, idle time included.

    A cut must be seen to work before the next, however long answers take (a slow source, a process without a core): (1)
    places in the queue are served at the current rate, not at that of the time when they were taken; (2) only answers to
    requests sent since the last cut count, over `SETTLE_S` at least. Otherwise each late refusal of an earlier request
    would cut again, down to nothing.
    """

    SETTLE_S = 1.0
    FIRST_S = 0.25
    """The least time over which a first guess counts the answers before it: a source serves more at once than it does for
    long. A guess that is too low grows in a second or two; one that is too high causes many refusals."""
    CUT_LEAST = 0.95
    CUT_MOST = 0.5
    LEAST_RATE = 0.2
    CLOSED = 8
    """Where a third is refused, so many in a row happen once in 6,600 cases. A larger number costs more refusals a
    quota."""
    SOON = 0.1
    """The part of the time between two openings that counts as a small one."""
    STEPS_S = 5.0
    """The unit of growth between two openings: 6 % more after one, 2.7 times as much after four."""
    LOOK_S = 1e-3
    """The least time between two checks of a place in the queue."""
    FORGET_S = 60.0
    """The time after a refusal from which there is no limit any more."""
    _base: float = math.inf
    _guessed: float = False
    _cut_at: float = -math.inf
    _paused_until: float = -math.inf
    _opened_at: float = -math.inf
    """The end of the last pause."""
    _since_opened: float = 0
    """Requests accepted since then."""
    _retry_after_s: float = 0.0
    """The last Retry-After that began a pause."""
    _between_s: float = 0.0
    """The time from one opening to the next; 0: unknown."""
    _in_a_row: float = 0
    """Requests refused in a row since the last cut."""
    _last: float = 0.0
    """The last place in the queue."""
    _due: float = 0.0
    """Places up to this one may ask; it advances at the rate."""
    _due_at: float = -math.inf
    served_at: float = -math.inf
    """When the source answered last."""
    _since: float = -math.inf
    """When the current counting period of `SETTLE_S` began. The counts of the previous one are kept."""
    _accepted: float = 0
    _refused: float = 0
    _since_before: float = -math.inf
    _accepted_before: float = 0
    _refused_before: float = 0

    def numbers(self) -> tuple[float, ...]:
        """The state as numbers: `Pace(*numbers)` goes on with it."""
        return _NUMBERS(self)

    def rate(self, now: float) -> float:
        """Requests a second; inf where there is no limit.

        t seconds after a cut, or after the pause that followed it, base * exp(0.01 t (1 + (t/10)^2)) + t/20: 1 % more after
        1 s, 6 % after 5 s, 2.7 times as much after 20 s. The last term lifts a rate that is too small. A first guess
        doubles every second until the next refusal. Where the time between two openings is known, t is scaled by
        `STEPS_S` over that time.
        """
        slower = max(1.0, self._between_s / self.STEPS_S)
        quiet_s = max(0.0, now - max(self._cut_at, self._paused_until)) / slower
        if math.isinf(self._base) or quiet_s > self.FORGET_S:
            return math.inf
        if self._guessed:
            return self._base * math.pow(2.0, quiet_s)
        return self._base * math.exp(0.01 * quiet_s * (1 + (quiet_s / 10) ** 2)) + quiet_s / 20 / slower

    def join(self, now: float) -> float:
        """Take a place in the queue, for `wait_s`. A caller that leaves early wastes its place."""
        self._move(now)
        self._last += 1
        return self._last

    def wait_s(self, place: float, now: float) -> float:
        """Seconds after which to call again; 0: the place may ask now. They end before its turn unless the rate doubles
        meanwhile: otherwise all places whose turn came early would ask at once."""
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
        self._since_opened += 1
        if sent_at >= self._cut_at:
            self._count(now)
            self._accepted += 1
            self._in_a_row = 0

    def refused(self, sent_at: float, now: float, retry_after_s: float) -> None:
        """Count a refusal (429 or 503), with its Retry-After or 0. All requests wait for that time where most are
        refused, or many in a row: then the source is closed, not at its limit."""
        self._move(now)
        if sent_at < self._cut_at:
            return
        self._count(now)
        self._refused += 1
        self._in_a_row += 1
        accepted = self._accepted + self._accepted_before
        refused = self._refused + self._refused_before
        since = self._since if math.isinf(self._since_before) else self._since_before
        span_s = now - since
        settled, mostly = span_s >= self.SETTLE_S, refused > accepted
        soon = retry_after_s <= self.SOON * self._between_s
        closed = retry_after_s > 0 and (soon or self._in_a_row >= self.CLOSED or (settled and mostly))
        rate = self.rate(now)
        if math.isinf(rate):
            self._base, self._guessed = max(1, accepted) / max(self.FIRST_S, span_s), True
            self._between_s = self._retry_after_s = 0.0
            self._opened_at, self._since_opened = since, accepted
        elif closed:
            self._base, self._guessed = self._quota(self._used(rate, span_s), now, retry_after_s, soon), False
        elif settled:
            rate = self._used(rate, span_s)
            sustained = rate * accepted / (accepted + refused)
            if retry_after_s > 0:
                sustained = min(sustained, accepted / span_s)
            self._base, self._guessed = self._cut(rate, sustained), False
        else:
            return
        if closed or mostly:
            self._paused_until = self._opened_at = max(self._paused_until, now + retry_after_s)
            self._since_opened = 0
        self._base = max(self.LEAST_RATE, self._base)
        self._cut_at, self._in_a_row = now, 0
        self._forget()

    def _used(self, rate: float, span_s: float) -> float:
        """The part of a rate that was used: the rate grows while refused callers stay away and ask less."""
        asked = max(self._accepted + self._refused, self._accepted_before + self._refused_before)
        used = max(self._base, asked / min(self.SETTLE_S, max(self.FIRST_S, span_s)))
        return min(rate, used)

    def _cut(self, rate: float, sustained: float) -> float:
        return min(self.CUT_LEAST * rate, max(self.CUT_MOST * rate, sustained))

    def _quota(self, rate: float, now: float, retry_after_s: float, soon: bool) -> float:
        """The rate after a pause until the source opens. A source whose Retry-After gets shorter counts down to its
        opening, so its quota is known. One that always says the same may accept more, sooner."""
        between_s = max(self.LOOK_S, now + retry_after_s - self._opened_at)
        sustained = self._since_opened / between_s
        counts_down, self._retry_after_s = soon or retry_after_s < self._retry_after_s, retry_after_s
        if not counts_down:
            return max(sustained, self._cut(rate, sustained))
        self._between_s = between_s
        return min(self.CUT_LEAST * rate, sustained)

    def _move(self, now: float) -> None:
        """Advance the queue to now. Of the places that were not taken while it was empty, one is left."""
        rate, since = self.rate(now), max(self._due_at, min(now, self._paused_until))
        if now > since:
            self._due = min(self._last + 1, self._due + rate * (now - since))
        self._due_at = now

    def _count(self, now: float) -> None:
        """Begin another counting period where this one is over. While there is no limit, old counts are dropped after an
        idle time, for a first guess needs recent ones; at a low rate, seconds pass without an answer."""
        age_s = now - self._since
        if age_s >= 2 * self.SETTLE_S and math.isinf(self.rate(now)):
            self._forget()
        if age_s >= self.SETTLE_S:
            self._since_before, self._accepted_before, self._refused_before = (
                self._since,
                self._accepted,
                self._refused,
            )
            self._since, self._accepted, self._refused = now, 0, 0

    def _forget(self) -> None:
        self._since = self._since_before = -math.inf
        self._accepted = self._refused = self._accepted_before = self._refused_before = 0


_NUMBERS = attrgetter(*(each.name for each in fields(Pace)))


@dataclass(slots=True)
class SourceBreaker:
    """A circuit breaker for a source. It opens after `FAILURES` in a row, over at least `QUIET_S`: the retries of a single
    call take six seconds for that. While it is open, one request an interval is a probe, and all others wait for its
    outcome."""

    FAILURES = 8
    QUIET_S = 2.0
    FIRST_S = 0.5
    LIMIT_S = 8.0
    _failures: int = 0
    _since: float = 0.0
    _interval_s: float = 0.0
    _probe_at: float = 0.0

    @property
    def open(self) -> bool:
        """True if the source counts as down."""
        return self._interval_s > 0

    def down_s(self, now: float) -> float:
        """Seconds since the first of the failures while it is open; else 0."""
        return now - self._since if self.open else 0.0

    def ask(self, now: float) -> float:
        """0: send the request, which is the interval's probe while it is open. Otherwise the seconds until the next
        probe."""
        if self.open and now < self._probe_at:
            return self._probe_at - now
        if self.open:
            self._probe_at = now + self._interval_s
            self._interval_s = min(self.LIMIT_S, 2 * self._interval_s)
        return 0.0

    def succeeded(self) -> None:
        """Close it: the source answered."""
        self._failures, self._interval_s = 0, 0.0

    def failed(self, now: float) -> bool:
        """Count a failure: no answer, a broken one, or one that says that the server does not work. Return True if it opens
        the breaker."""
        self._failures += 1
        if self._failures == 1:
            self._since = now
        if not self.open and self._failures >= self.FAILURES and now - self._since >= self.QUIET_S:
            self._interval_s, self._probe_at = self.FIRST_S, now + self.FIRST_S
            return True
        return False
