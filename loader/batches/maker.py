"""Makes batches with reports of what making them took, in a worker or in the trainer."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from cachesvc.core.errors import CacheError, from_code
from cachesvc.core.stalls import CAUSES
from loader.batches.bad_samples import BatchRepair, OnError, RepairingFeed
from loader.batches.feed import Feed
from loader.reading.reader import ORIGINS
from loader.reading.wait_clock import DECODE, HAND_OVER, READING, TRANSFER


@dataclass(frozen=True, slots=True)
class BatchReport:
    """The time and bytes that making a batch took; travels with the batch.

    `began` and `ended` are perf_counter times, which all processes of a node share. `transfer` is when the copy to
    the device began and was queued. `reading_s` is by `READING`, `origin_bytes` by `ORIGINS`. `failure` is the code
    and message of an error that came instead of a batch. `contents`: digests that the worker was granted since its last
    report, as `Feed.note_contents` takes them.
    """

    began: float
    ended: float
    reading_s: tuple[float, ...]
    origin_bytes: tuple[int, ...]
    repair: BatchRepair | None = None
    contents: Sequence[tuple[int, int, bytes]] = ()
    failure: tuple[int, str] | None = None
    transfer: tuple[float, float] = (0.0, 0.0)
    pid: int = field(default_factory=os.getpid)


class MadeBatch(NamedTuple):
    """A batch and its report."""

    batch: Any
    report: BatchReport


class BatchMaker:
    """Makes batches and their reports. Picklable; threads may share one."""

    def __init__(self, feed: Feed, on_error: OnError) -> None:
        self.feed, self.repairing = feed, RepairingFeed(feed, on_error)

    def make(self, key: tuple[int, int]) -> MadeBatch:
        """Make the batch of a turn. A typed error is returned in the report: it reaches the trainer as it is. Other errors
        are raised, and reach it with a traceback."""
        began, waited, read = time.perf_counter(), self.feed.reading_s(), self.feed.origin_bytes()
        batch, repair, failure = None, None, None
        try:
            batch, repair = self.repairing.make(key)
        except CacheError as error:
            failure = error.code, str(error)
        except StopIteration as error:  # it would end the iteration silently
            raise RuntimeError("making a batch (a collate_fn, for example) raised StopIteration") from error
        now_waited, now_read = self.feed.reading_s(), self.feed.origin_bytes()
        reading = tuple(now - before for now, before in zip(now_waited, waited, strict=True))
        bytes_read = tuple(now_read.get(origin, 0) - read.get(origin, 0) for origin in ORIGINS)
        contents, ended = self.feed.take_contents(), time.perf_counter()
        return MadeBatch(batch, BatchReport(began, ended, reading, bytes_read, repair, contents, failure))


class ReportTotals:
    """Sums over the reports of batches that were handed over. `origin_bytes` counts reads of other processes only."""

    def __init__(self) -> None:
        self.origin_bytes = dict.fromkeys(ORIGINS, 0)
        self.waited_s = [0.0] * len(CAUSES)

    def add(self, report: BatchReport, asked: float) -> None:
        """Add the report of a batch that a step asked for at `asked`. The wait until the batch was made is split
        among causes in proportion to what making it took. The wait after that is transfer and hand-over."""
        if report.pid != os.getpid():  # this process counts its own reads itself
            for origin, count in zip(ORIGINS, report.origin_bytes, strict=True):
                self.origin_bytes[origin] += count
        now = time.perf_counter()
        handed_s = now - max(asked, min(report.ended, now))
        made_s, share = max(report.ended - report.began, 1e-9), now - asked - handed_s
        moved_s = max(0.0, report.transfer[1] - max(asked, report.transfer[0]))
        self.waited_s[TRANSFER] += moved_s
        self.waited_s[HAND_OVER] += handed_s - moved_s
        self.waited_s[DECODE] += share * max(0.0, 1.0 - sum(report.reading_s) / made_s)
        for cause in range(len(READING)):
            self.waited_s[cause] += share * min(1.0, report.reading_s[cause] / made_s)


def move_batch(made: MadeBatch, move: Callable[[Any], Any]) -> MadeBatch:
    """Return the batch on its way to the device, with the time that pinning it and queuing the copy took. The
    device waits for the copy, this process does not."""
    if made.report.failure is not None:
        return made
    began = time.perf_counter()
    batch = move(made.batch)
    return MadeBatch(batch, replace(made.report, transfer=(began, time.perf_counter())))


def raise_failure(report: BatchReport) -> None:
    """Raise the typed error in a report, if any."""
    if report.failure is not None:
        raise from_code(*report.failure)
