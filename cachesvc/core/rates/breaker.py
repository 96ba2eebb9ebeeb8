"""Decides whether a cache directory works: a circuit breaker over one tier, pure.

Two witnesses are needed before a tier is given up, because a busy disk is not a broken one. A small read, the *canary*, is
sent every `probe_s`. A call of the tier that fails, one that is under way for `stuck_s`, or a canary that fails makes the
tier *suspect*, and the next probe is *thorough*: it writes, syncs and reads back.

A disk may be slow in writes alone. A call that is under way for `slow_s` makes the tier *doubted*, and canaries also
create, write, rename and remove a file until one of them is quick. They do not sync: under other writes a sync takes long
although the disk works.

    WORKS   a thorough probe fails                              LOST: the disk answers with errors
    WORKS   for `lost_s` no probe was answered within `slow_s`  LOST: the disk hardly answers
    LOST    `back_probes` thorough probes in a row are good     WORKS

A disk that answers neither a probe nor a call for `slow_s` is not lost yet, but nothing more is asked of it (`silent`,
`daemon/disks/watch.py`).

One quick answer restarts `lost_s` (for a doubted tier: to a probe that writes): load makes some answers late, not all of
them. Load on the daemon itself delays the calls of this breaker, and is not counted against the disk. A tier that is lost
again soon after it came back is probed less often, so that it does not flap.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits in seconds, chosen so that a tier is lost within 30 s of its first bad answer."""

    probe_s: float = 2.0
    """Between canaries: a read of 4 KiB costs a disk nothing."""
    slow_s: float = 3.0
    """A small read that takes longer is slow: ten times what a loaded disk needs, and less than the 5 s of a failing
    one."""
    lost_s: float = 15.0
    """The time without a quick answer after which a tier is lost: longer than a burst of load."""
    stuck_s: float = 8.0
    """A call under way for so long makes the tier suspect; with `lost_s` and a probe this stays under 30 s."""
    back_s: float = 5.0
    """Between probes of a lost tier; doubles up to `back_cap_s` where it is lost again within `calm_s`."""
    back_cap_s: float = 300.0
    calm_s: float = 600.0
    back_probes: int = 3
    """Good answers in a row before a lost tier works again."""


class Probe(Enum):
    """A kind of probe."""

    CANARY = 1
    WRITE = 2
    """A canary that also writes, without a sync."""
    THOROUGH = 3


class Breaker:
    """The breaker of one tier. Times are seconds of any clock that does not go back."""

    def __init__(self, limits: Limits, now: float) -> None:
        self.limits = limits
        self.lost = False
        self.why = ""
        """Why the tier was lost, as text for people."""
        self.silent = False
        """Whether a probe that does not sync has been under way for `slow_s`."""
        self._asked_at: float | None = None
        self._probe = Probe.CANARY
        self._due_at = now
        self._suspect = False
        self._doubted = False
        self._bad_since: float | None = None
        self._looked_at = now
        self._good = 0
        self._pause_s = limits.back_s
        self._back_at: float | None = None

    def suspect(self, now: float) -> None:
        """Probe thoroughly now: a call of the tier failed or is stuck."""
        if not self.lost:
            self._suspect = True
            self._due_at = min(self._due_at, now)

    def doubt(self) -> None:
        """Probe with writes: a call of the tier is slow."""
        self._doubted = True

    def next_deadline(self) -> float:
        """The time when `tick` is owed, in seconds."""
        if self._asked_at is None:
            return self._due_at
        return self._looked_at + self.limits.slow_s / 2

    def tick(self, now: float) -> Probe | None:
        """The probe to begin now, or None. Call `answered` when it ends. The tier may become lost here."""
        self._look(now)
        if self._asked_at is not None:
            if now - self._asked_at > self.limits.slow_s:
                self._slow(now)
                self.silent = self._probe is not Probe.THOROUGH
            return None
        if now < self._due_at:
            return None
        self._probe = Probe.WRITE if self._doubted else Probe.CANARY
        if self._suspect or self.lost:
            self._probe = Probe.THOROUGH
        self._asked_at, self._suspect = now, False
        return self._probe

    def answered(self, now: float, took_s: float, error: str = "") -> None:
        """End a probe that took `took_s`; `error` is the tier's error, empty where there was none."""
        assert self._asked_at is not None, "an answer without a probe"
        quick = took_s - self._look(now) <= self.limits.slow_s
        if not quick:
            self._slow(now)
        self._asked_at, self.silent = None, False
        self._due_at = now + (self._pause_s if self.lost else self.limits.probe_s)
        if error and self._probe is not Probe.THOROUGH:
            self.suspect(now)
        elif error and not self.lost:
            self._lose(now, error)
        elif quick and not error and not (self._doubted and self._probe is Probe.CANARY):
            self._bad_since, self._doubted = None, False
        if self.lost:
            self._good = self._good + 1 if quick and not error else 0
            if self._good >= self.limits.back_probes:
                self._return(now)

    def _look(self, now: float) -> float:
        """Seconds that the breaker itself was called late while a probe was under way: they do not count against the
        disk."""
        late_s = now - self._looked_at - self.limits.slow_s
        self._looked_at = now
        if self._asked_at is None or late_s <= 0:
            return 0.0
        self._asked_at += late_s
        self._bad_since = self._bad_since + late_s if self._bad_since is not None else None
        return late_s

    def _slow(self, now: float) -> None:
        assert self._asked_at is not None
        if self._bad_since is None:
            self._bad_since = self._asked_at
        if not self.lost and now - self._bad_since >= self.limits.lost_s:
            self._lose(now, f"no quick answer for {now - self._bad_since:.0f} s")

    def _lose(self, now: float, why: str) -> None:
        again = self._back_at is not None and now - self._back_at < self.limits.calm_s
        self._pause_s = min(2 * self._pause_s, self.limits.back_cap_s) if again else self.limits.back_s
        self.lost, self.why, self._good, self._suspect = True, why, 0, False
        self._due_at = now + self._pause_s

    def _return(self, now: float) -> None:
        self.lost, self.why, self._bad_since, self._doubted = False, "", None, False
        self._back_at, self._due_at = now, now + self.limits.probe_s
