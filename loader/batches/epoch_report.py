"""The report of one rank's latest epoch: wait times by cause, bytes by origin, and bad samples."""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Callable
from time import perf_counter
from typing import Any

from cachesvc.core.histogram import BUCKETS
from cachesvc.core.stalls import CAUSES, StallReport
from loader.batches.bad_samples import BadSampleLog, BatchRepair
from loader.batches.feed import Feed
from loader.batches.maker import MadeBatch, ReportTotals, raise_failure
from loader.batches.stats import StallClock, Stats
from loader.reading.reader import ORIGINS
from loader.reading.wait_clock import DECODE, HAND_OVER

_log = logging.getLogger("cachesvc")
REPORT_EVERY_S = 5.0
"""Metrics are scraped about every 15 s."""


class EpochReport:
    """The report of one loader's latest epoch. A batch that the training thread makes itself costs two clock reads;
    batches made elsewhere arrive with their own reports, which are summed in `totals`."""

    def __init__(self, has_reports: bool, has_workers: bool) -> None:
        """`has_reports`: batches come with reports, from workers (`has_workers`) or from a thread that moves them to
        a device."""
        self._has_reports, self._remainder = has_reports, HAND_OVER if has_workers else DECODE
        self.totals = ReportTotals()
        self.bad_samples = BadSampleLog()
        self._feed: Feed | None = None
        self._size = 0
        self._repair: BatchRepair | None = None
        self._clock = StallClock({}, [0.0] * len(CAUSES), self._remainder)
        self._reported, self._report_at = self.stats(), 0.0
        self._reported_buckets: tuple[int, ...] = (0,) * BUCKETS

    def begin(self, feed: Feed) -> None:
        """Begin an epoch."""
        self._feed, self._size = feed, feed.share.batch_size
        self.bad_samples, self._repair = BadSampleLog(), None
        self._clock = StallClock(self._bytes_read(), self._waited_s(), self._remainder)
        self._reported, self._reported_buckets = self.stats(), (0,) * BUCKETS

    def note_repair(self, batch: Any, repair: BatchRepair | None) -> Any:
        """Record the repair of a batch, if any, and return the batch."""
        if repair is not None:
            self._repair = repair
            self.bad_samples.record(repair)
        return batch

    def fetch_reported(self, fetch: Callable[[tuple[int, int]], MadeBatch], key: tuple[int, int]) -> Any:
        """Fetch a batch that was made elsewhere and add up its report. Raises the typed error that making it met."""
        asked = perf_counter()
        made = fetch(key)
        self.totals.add(made.report, asked)
        if self._feed is not None:
            self._feed.note_contents(made.report.contents)
        raise_failure(made.report)
        return self.note_repair(made.batch, made.report.repair)

    def record(self, asked: float, key: tuple[int, int], full: int) -> None:
        """Record that batch `key` was handed to a step that asked for it at `asked`. Turns below `full` are full
        batches."""
        if key[1] < full and self._repair is None:
            self._clock.record(asked, self._size)
        else:
            assert self._feed is not None, "an epoch has begun"
            self._clock.record(asked, self.valid(self._feed, key))

    def repair(self, key: tuple[int, int]) -> BatchRepair | None:
        """Return the repair of a turn's batch, if that is the latest repair."""
        found = self._repair
        return found if found is not None and (found.epoch, found.turn) == key else None

    def valid(self, feed: Feed, key: tuple[int, int]) -> int:
        """Return how many samples of a batch are real."""
        repair = self.repair(key)
        return repair.valid if repair is not None else feed.valid(*key)

    def stats(self) -> Stats:
        """Return the statistics of the latest epoch so far."""
        return self._clock.stats(self._bytes_read(), self._waited_s(), self.bad_samples.count)

    def end(self, rank: int, epoch: int, log: bool) -> None:
        """End an epoch."""
        self.report_to_daemon(math.inf)
        self._report_at = 0.0
        if log:
            _log.info("rank %d, epoch %d: %s", rank, epoch, self.stats().line())

    def report_to_daemon(self, now: float) -> None:
        """Send what happened since the last report to the daemon's metrics, at most once in `REPORT_EVERY_S`. `now`
        is a perf_counter time."""
        if self._feed is None or now < self._report_at:
            return
        self._report_at = now + REPORT_EVERY_S
        stats, before = self.stats(), self._reported
        buckets, buckets_before = tuple(self._clock.buckets), self._reported_buckets
        self._reported, self._reported_buckets = stats, buckets
        self._feed.report(
            StallReport(
                stats.steps - before.steps,
                tuple(_us(stats.wait_by_cause_s[each] - before.wait_by_cause_s[each]) for each in CAUSES),
                tuple(map(_us, (stats.wait_p50_s, stats.wait_p95_s, stats.wait_p99_s))),
                tuple(map(operator.sub, buckets, buckets_before)),
            )
        )

    def _bytes_read(self) -> dict[str, int]:
        """Bytes read by this process and by its workers."""
        here = self._feed.origin_bytes() if self._feed is not None else {}
        there = self.totals.origin_bytes
        return {origin: here.get(origin, 0) + there[origin] for origin in ORIGINS}

    def _waited_s(self) -> list[float]:
        """Seconds by `CAUSES` since this loader was made, from batch reports or from this thread's own reads."""
        if self._has_reports or self._feed is None:
            return list(self.totals.waited_s)
        return [*self._feed.reading_s(), 0.0, 0.0, 0.0]


def _us(seconds: float) -> int:
    """Convert to microseconds. Rounding may make the difference of two sums slightly negative."""
    return max(0, round(seconds * 1e6))
