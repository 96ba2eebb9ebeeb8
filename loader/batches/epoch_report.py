"""What one rank was handed in its latest epoch: how long it waited and why, which bytes, which bad samples."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from time import perf_counter
from typing import Any

from cachesvc.core.stalls import CAUSES, StallReport
from loader.batches.bad_samples import Found, Repair
from loader.batches.feed import Feed
from loader.batches.maker import Ledger, Made, raise_failure
from loader.batches.stats import StallClock, Stats
from loader.reading.reader import ORIGINS
from loader.reading.wait_clock import DECODE, HAND_OVER

_log = logging.getLogger("cachesvc")
TELL_EVERY_S = 5.0
"""A scrape comes every 15 s or so."""


class Account:
    """Of one loader. Batches that this thread makes itself cost a step two clock reads; those that others make
    are entered in `ledger` with their reports."""

    def __init__(self, others: bool, workers: bool) -> None:
        """`others`: batches come with reports, from `workers` or from torch's own machinery in this process."""
        self._others, self._rest = others, HAND_OVER if workers else DECODE
        self.ledger = Ledger()
        self.found = Found()
        self._feed: Feed | None = None
        self._size = 0
        self._repair: Repair | None = None
        self._clock = StallClock({}, [0.0] * len(CAUSES), self._rest)
        self._told, self._tell_at = self.stats(), 0.0

    def begin(self, feed: Feed) -> None:
        """An epoch begins."""
        self._feed, self._size = feed, feed.share.batch_size
        self.found, self._repair = Found(), None
        self._clock = StallClock(self._bytes_read(), self._waited_s(), self._rest)
        self._told = self.stats()

    def noted(self, batch: Any, repair: Repair | None) -> Any:
        """The batch, after what was mended in it is noted."""
        if repair is not None:
            self._repair = repair
            self.found.note(repair)
        return batch

    def handed(self, fetch: Callable[[tuple[int, int]], Made], key: tuple[int, int]) -> Any:
        """A batch that others made. Raises the typed error that they met."""
        asked = perf_counter()
        made = fetch(key)
        self.ledger.enter(made.report, asked)
        raise_failure(made.report)
        return self.noted(made.batch, made.report.repair)

    def record(self, asked: float, key: tuple[int, int], full: int) -> None:
        """The batch of turn `key` is handed over to a step that asked at `asked`; turns below `full` are whole."""
        if key[1] < full and self._repair is None:
            self._clock.record(asked, self._size)
        else:
            assert self._feed is not None, "an epoch has begun"
            self._clock.record(asked, self.valid(self._feed, key))

    def repair(self, key: tuple[int, int]) -> Repair | None:
        """What was mended in the batch of a turn, if that was the latest such."""
        found = self._repair
        return found if found is not None and (found.epoch, found.turn) == key else None

    def valid(self, feed: Feed, key: tuple[int, int]) -> int:
        """How many samples of a batch are real."""
        repair = self.repair(key)
        return repair.valid if repair is not None else feed.valid(*key)

    def stats(self) -> Stats:
        """The latest epoch so far."""
        return self._clock.stats(self._bytes_read(), self._waited_s(), self.found.count)

    def end(self, rank: int, epoch: int, log: bool) -> None:
        """An epoch ended."""
        self.tell(math.inf)
        self._tell_at = 0.0
        if log:
            _log.info("rank %d, epoch %d: %s", rank, epoch, self.stats().line())

    def tell(self, now: float) -> None:
        """Let the daemon's metrics know of what came since the last time, every few seconds (`now`: perf_counter)."""
        if self._feed is None or now < self._tell_at:
            return
        self._tell_at = now + TELL_EVERY_S
        stats, before = self.stats(), self._told
        self._told = stats
        self._feed.report(
            StallReport(
                stats.steps - before.steps,
                tuple(_us(stats.wait_by_cause_s[each] - before.wait_by_cause_s[each]) for each in CAUSES),
                tuple(map(_us, (stats.wait_p50_s, stats.wait_p95_s, stats.wait_p99_s))),
            )
        )

    def _bytes_read(self) -> dict[str, int]:
        """By this process and by its workers."""
        here = self._feed.origin_bytes() if self._feed is not None else {}
        there = self.ledger.origin_bytes
        return {origin: here.get(origin, 0) + there[origin] for origin in ORIGINS}

    def _waited_s(self) -> list[float]:
        """By `CAUSES`, since this loader was made: as batches report, or this thread's own reads."""
        if self._others or self._feed is None:
            return list(self.ledger.waited_s)
        return [*self._feed.reading_s(), 0.0, 0.0, 0.0]


def _us(seconds: float) -> int:
    """Microseconds; a cause's sum may shrink by a rounding."""
    return max(0, round(seconds * 1e6))
