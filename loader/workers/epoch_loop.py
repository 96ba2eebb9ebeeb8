"""Runs one `iter()` of a loader: the batches of one epoch after another, until a newer iteration takes over."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from functools import partial
from time import perf_counter
from typing import Any, Protocol

from cachesvc.core.errors import InvalidInput
from loader.batches.bad_samples import OnError, RepairingFeed
from loader.batches.epoch_report import EpochReport
from loader.batches.feed import Feed
from loader.job.checkpoint import LoaderProgress
from loader.job.rank_failures import Agreement, RankFailureWatch, watched
from loader.workers.engines import BatchEngine, engine_for, pinning
from loader.workers.iteration import BatchError, is_batch_error
from loader.workers.settings import WorkerSettings

PASSED_EVERY_S = 0.05
"""Interval at which the daemon hears this rank's position, besides the ends of extents. A message costs 5 us."""
NEWER_ITERATION = (
    "a newer iteration of this DataLoader has begun, and a DataLoader has a single position: make one DataLoader for "
    "each concurrent iteration"
)


class LoopSettings(Protocol):
    """The settings that a loader's user may change while an iteration runs."""

    epochs: int | None
    on_error: OnError
    log_stats: bool
    peer_failure_s: float


class BatchSource:
    """The batches of a feed, made as `settings` say. Repairs and the reports of workers are added to `report`."""

    def __init__(self, feed: Feed, settings: WorkerSettings, report: EpochReport) -> None:
        self.feed, self.report = feed, report
        self.in_process = settings.num_workers == 0
        """Batches are made in this process."""
        self._settings = settings
        self._engine: BatchEngine | None = None
        self._on_error: OnError | None = None

    def start(self, epoch: int, first: int, last: int, on_error: OnError) -> Callable[[tuple[int, int]], Any]:
        """Begin to make the turns [first, last) of an epoch. Returns the function that gives the batch of an
        (epoch, turn). That is the feed itself if there is nothing to report."""
        if on_error != self._on_error:
            self.stop()
            self._engine, self._on_error = engine_for(self.feed, self._settings, on_error), on_error
        if self._engine is not None:
            self._engine.start(epoch, first, last)
            return partial(self.report.fetch_reported, self._engine.fetch)
        make = self.feed.__getitem__ if on_error == "raise" else self._repaired(on_error)
        pin = pinning(self._settings)
        return make if pin is None else lambda key: pin(make(key))

    def _repaired(self, on_error: OnError) -> Callable[[tuple[int, int]], Any]:
        note_repair, make = self.report.note_repair, RepairingFeed(self.feed, on_error).make
        return lambda key: note_repair(*make(key))

    def stop(self) -> None:
        """Stop making batches until the next start."""
        if self._engine is not None:
            self._engine.stop()


def batch_outside_iterations(
    feed: Feed, settings: WorkerSettings, on_error: OnError, key: tuple[int, int]
) -> Any:
    """Make the batch of an (epoch, turn) without workers. `feed` serves nothing else. Raises InvalidInput for an epoch
    without batches, and the errors of making it."""
    if key[1] >= feed.turns(key[0]):
        raise InvalidInput(f"epoch {key[0]} has no batch: the data is less than one")
    source = BatchSource(feed, settings.without_workers(), EpochReport(settings.reported, False))
    try:
        return source.start(*key, key[1] + 1, on_error)(key)
    finally:
        source.stop()


class EpochLoop:
    """Advances a loader's progress batch by batch. If the loader's position is moved, the epoch ends, and the next
    one begins at the new position with a new `prepared()`: a loaded state may have another order."""

    def __init__(
        self, settings: LoopSettings, progress: LoaderProgress, prepared: Callable[[], BatchSource], rank: int
    ) -> None:
        self._settings, self._progress, self._prepared, self._rank = settings, progress, prepared, rank
        self._source = prepared()
        self._iteration = progress.take_over()

    def batches(self, agreement: Agreement | None) -> Generator[Any, None, None]:
        """Yield batches, or a BatchError in place of one, and watch other ranks under their agreement from the first batch
        on. Raises errors that end the iteration: PeerRankFailed, any error in a job of several ranks, and the death of
        workers."""
        watch = None if agreement is None else RankFailureWatch(agreement, self._settings.peer_failure_s)
        with watched(watch, self._place):
            try:
                done = self._progress.place.done_of(self._settings.epochs)
                while self._settings.epochs is None or done < self._settings.epochs:
                    if self._progress.iteration is not self._iteration:
                        raise InvalidInput(NEWER_ITERATION)
                    self._source, self._progress.place.epochs_done = self._prepared(), done
                    yield from self._epoch(self._source, watch)
                    done += 1
            finally:  # also when abandoned, unless a newer iteration took over
                if self._progress.iteration is self._iteration:
                    self._source.feed.given_up()
                    self._source.stop()

    def _place(self) -> str:
        return self._progress.place.text(self._source.feed.share.accumulate)

    def _epoch(self, source: BatchSource, watch: RankFailureWatch | None) -> Iterator[Any]:
        feed, report, accumulate = source.feed, source.report, source.feed.share.accumulate
        progress, iteration, place = self._progress, self._iteration, self._progress.place
        if self._settings.epochs is None and not place.reach(feed):
            raise InvalidInput("the data is less than one batch, so epochs=None would never give one")
        epoch, turns = place.epoch, feed.turns(place.epoch)
        report.begin(feed)
        began, report_at = perf_counter(), 0.0
        consumed, fetch = feed.submit(epoch), None
        full = 0 if feed.spec.excluded else feed.order(epoch).full_steps * accumulate
        before = 0 if watch is None else feed.turns_of(0, epoch)
        try:
            while True:
                if progress.iteration is not iteration:
                    raise InvalidInput(NEWER_ITERATION)
                if progress.place is not place or (turn := place.turn) >= turns:
                    return
                asked = began or perf_counter()  # the first wait includes the plan and the start of workers
                began = 0.0
                step = turn // accumulate
                if step in consumed or asked >= report_at:
                    feed.passed_step(step)
                    report.report_to_daemon(asked)
                    report_at = asked + PASSED_EVERY_S
                if watch is not None:
                    watch.check()
                fetch = fetch or source.start(epoch, turn, turns, self._settings.on_error)
                key = epoch, turn
                try:
                    batch = fetch(key)
                except Exception as error:
                    if watch is not None or not is_batch_error(error, source.in_process):
                        raise
                    batch = BatchError(error)
                if isinstance(batch, BatchError):
                    source.stop()
                    yield batch
                    fetch = None
                    # a newer iteration passes over the turn itself
                    if not batch.retry and progress.iteration is iteration:
                        place.pass_over(turn)
                    continue
                place.hand(key)
                repair = report.repair(key)
                instead = None if repair is None else repair.indices[: repair.valid]
                progress.handed.note(feed, *key, instead)
                if watch is not None:
                    watch.hand(epoch, turn, before + turn)
                report.record(asked, key, full)
                yield batch
        finally:  # also if the caller takes the last batch and never asks again
            if watch is not None:
                watch.left = place.turn < turns
            if place.turn >= turns and progress.place is place and progress.iteration is iteration:
                feed.passed(turns + accumulate)
                place.finish(turns)
                if watch is not None:
                    watch.complete = place.epochs_done == self._settings.epochs
                report.end(self._rank, epoch, self._settings.log_stats)
