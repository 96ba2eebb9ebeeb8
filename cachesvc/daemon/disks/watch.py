"""The watch over the cache directories: sends the probes that the core's breaker asks for and reports their results."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from cachesvc.core.errors import CacheError
from cachesvc.core.model import TierName
from cachesvc.core.rates.breaker import Breaker, Limits, Probe
from cachesvc.daemon.loop.lanes import Lane
from cachesvc.tiers.probe import Room

log = logging.getLogger(__name__)


class ProbedTier(Protocol):
    """A tier on a disk."""

    name: TierName

    def probe(self, thorough: bool, sync: bool = True) -> Room:
        """Check that the directory works; return the disk's room. Raises `TierFailed`."""
        ...

    def revive(self) -> Room:
        """Probe a lost tier thoroughly, in another directory where the path names one. Raises `CacheError`."""
        ...


@dataclass(slots=True)
class _Watched:
    tier: ProbedTier
    breaker: Breaker
    probes: Lane
    calls: tuple[Lane, ...]
    jobs_s: Callable[[], float]
    reported_lost: bool = False
    stalled: bool = False
    logged_why: str = ""
    """The last logged reason why the tier stays lost."""


@dataclass(eq=False)
class DiskWatch:
    """Runs on the loop's thread, except the probes, which run on a thread of each tier."""

    _lost: Callable[[TierName, str], None]
    _back: Callable[[TierName], None]
    _measured: Callable[[TierName, Room], None]
    _stalled: Callable[[TierName, bool], None]
    _clock: Callable[[], float]
    _limits: Limits = field(default_factory=Limits)
    _tiers: dict[TierName, _Watched] = field(default_factory=dict)

    def add(
        self, tier: ProbedTier, probes: Lane, calls: tuple[Lane, ...], jobs_s: Callable[[], float]
    ) -> None:
        """Watch a tier. `probes` is the lane of its probes, and `calls` the lanes of its calls.

        `jobs_s` returns the age in seconds of the oldest filler job in the tier.
        """
        breaker = Breaker(self._limits, self._clock())
        self._tiers[tier.name] = _Watched(tier, breaker, probes, calls, jobs_s)

    def not_opened(self, tier: TierName, why: str) -> None:
        """Begin with a lost tier; the failed opening counts as its first probe."""
        watched, now = self._tiers[tier], self._clock()
        watched.breaker.suspect(now)
        watched.breaker.tick(now)
        watched.breaker.answered(now, 0.0, why)
        self._report(watched)

    def suspect(self, tier: TierName) -> None:
        """Probe a tier soon, since one of its calls failed."""
        if watched := self._tiers.get(tier):
            watched.breaker.suspect(self._clock())

    def next_deadline(self) -> float:
        """The time at which `tick` is due; inf without a tier to watch."""
        return min((watched.breaker.next_deadline() for watched in self._tiers.values()), default=math.inf)

    def tick(self) -> None:
        """Send the probes that are due."""
        now = self._clock()
        for watched in self._tiers.values():
            if watched.breaker.next_deadline() > now:
                continue
            if self._stuck(watched):
                watched.breaker.suspect(now)
            slow = max([watched.jobs_s(), *map(Lane.busy_s, watched.calls)]) > self._limits.slow_s
            if slow:
                watched.breaker.doubt()
            probe = watched.breaker.tick(now)
            if probe is not None:
                self._send(watched, probe)
            self._report_stall(watched, watched.breaker.silent and (slow or watched.stalled))
            self._report(watched)

    def _stuck(self, watched: _Watched) -> bool:
        return any(lane.busy_s() > self._limits.stuck_s for lane in watched.calls)

    def _send(self, watched: _Watched, probe: Probe) -> None:
        clock, lost = self._clock, watched.breaker.lost
        sent_at = clock()

        def run() -> tuple[float, Room | None, str]:
            began_at = clock()
            try:
                tier = watched.tier
                writes, sync = probe is not Probe.CANARY, probe is not Probe.WRITE
                room: Room | None = tier.revive() if lost else tier.probe(writes, sync)
                error = ""
            except CacheError as found:
                room, error = None, str(found)
            return clock() - began_at, room, error

        answered = partial(self._answered, watched)
        watched.probes.submit(run, answered, lambda error: answered((clock() - sent_at, None, str(error))))

    def _answered(self, watched: _Watched, answer: tuple[float, Room | None, str]) -> None:
        took_s, room, error = answer
        if watched.breaker.lost and self._stuck(watched):
            error = error or "a call is still under way"
        watched.breaker.answered(self._clock(), took_s, error)
        self._report_stall(watched, False)
        self._report(watched)
        if error and watched.breaker.lost and error != watched.logged_why:
            watched.logged_why = error
            log.warning("a tier stays lost", extra={"tier": watched.tier.name, "why": error})
        if room is not None:
            self._measured(watched.tier.name, room)

    def _report_stall(self, watched: _Watched, stalled: bool) -> None:
        if stalled != watched.stalled:
            watched.stalled = stalled
            self._stalled(watched.tier.name, stalled)

    def _report(self, watched: _Watched) -> None:
        if watched.breaker.lost == watched.reported_lost:
            return
        watched.reported_lost = watched.breaker.lost
        if watched.reported_lost:
            watched.logged_why = watched.breaker.why
            self._lost(watched.tier.name, watched.breaker.why)
        else:
            self._back(watched.tier.name)
