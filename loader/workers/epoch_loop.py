"""One `iter()` of a loader: the batches of one epoch after the other, until a newer iteration takes over."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from time import perf_counter
from typing import Any, Protocol

from cachesvc.core.errors import InvalidInput
from loader.batches.bad_samples import OnError
from loader.job.checkpoint import LoaderProgress
from loader.job.rank_failures import RankFailureWatch, watched
from loader.workers.batch_source import Supply
from loader.workers.iteration import Raised, of_the_data

PASSED_EVERY_S = 0.05
"""How often the daemon hears where this rank stands besides the ends of extents: a message costs 5 us."""
NEWER_ITERATION = (
    "a newer iteration of this DataLoader has begun, and it has one place in the data: make a DataLoader for each that "
    "runs at the same time"
)


class Wishes(Protocol):
    """Of a loader's user, who may change them while an iteration runs."""

    epochs: int | None
    on_error: OnError
    log_stats: bool


class Epochs:
    """Takes a loader's progress further, batch by batch. An epoch ends where its place is moved; the next one begins at
    the new place, with what `prepared` gives then: a state that was loaded brings an order of its own."""

    def __init__(
        self, wishes: Wishes, progress: LoaderProgress, prepared: Callable[[], Supply], rank: int
    ) -> None:
        self._wishes, self._progress, self._prepared, self._rank = wishes, progress, prepared, rank
        self._supply = prepared()
        self._mine = progress.take_over()

    def batches(self, listen: Callable[[], RankFailureWatch | None]) -> Generator[Any, None, None]:
        """Batches, or what was Raised in place of one; `listen` gives the watch on other ranks, when the first is asked
        for. Raises what no batch comes after: PeerRankFailed, among several ranks any error, workers that died."""
        done, watch = 0, listen()
        with watched(watch, self._place):
            try:
                while self._wishes.epochs is None or done < self._wishes.epochs:
                    if self._progress.iteration is not self._mine:
                        raise InvalidInput(NEWER_ITERATION)
                    self._supply = self._prepared()
                    yield from self._epoch(self._supply, watch)
                    done += 1
            finally:  # at its end, and when it is abandoned; unless another has taken over
                if self._progress.iteration is self._mine:
                    self._supply.feed.given_up()
                    self._supply.rest()

    def _place(self) -> str:
        return self._progress.place.text(self._supply.feed.share.accumulate)

    def _epoch(self, supply: Supply, watch: RankFailureWatch | None) -> Iterator[Any]:
        feed, account, accumulate = supply.feed, supply.account, supply.feed.share.accumulate
        progress, mine, place = self._progress, self._mine, self._progress.place
        if self._wishes.epochs is None and not place.reach(feed):
            raise InvalidInput("the data is less than one batch, and epochs=None never ends")
        epoch, turns = place.epoch, feed.turns(place.epoch)
        account.begin(feed)
        began, tell_at = perf_counter(), 0.0
        consumed, fetch = feed.submit(epoch), None
        full = feed.order(epoch).full_steps * accumulate
        before = 0 if watch is None else feed.turns_of(0, epoch)
        try:
            while True:
                if progress.iteration is not mine:
                    raise InvalidInput(NEWER_ITERATION)
                if progress.place is not place or (turn := place.turn) >= turns:
                    return
                asked = began or perf_counter()  # the first waits for the plan and the workers' start too
                began = 0.0
                step = turn // accumulate
                if step in consumed or asked >= tell_at:
                    feed.passed_step(step)
                    account.tell(asked)
                    tell_at = asked + PASSED_EVERY_S
                if watch is not None and watch.failure is not None:
                    watch.raise_failure()
                fetch = fetch or supply.start(epoch, turn, turns, self._wishes.on_error)
                key = epoch, turn
                try:
                    batch = fetch(key)
                except Exception as error:
                    if watch is not None or not of_the_data(error, supply.made_here):
                        raise
                    batch = Raised(error)
                if isinstance(batch, Raised):
                    supply.rest()
                    yield batch
                    fetch = None
                    if (
                        not batch.again and progress.iteration is mine
                    ):  # else it is the newer one's to pass over
                        place.pass_over(turn)
                    continue
                place.hand(key)
                if watch is not None:
                    watch.handed = epoch, turn + 1, before + turn + 1
                account.record(asked, key, full)
                yield batch
        finally:  # also for who has taken the last batch and never asks again
            if watch is not None and place.turn < turns:
                watch.handed = None  # the epoch begins anew
            if place.turn >= turns and progress.place is place and progress.iteration is mine:
                feed.passed(turns + accumulate)
                place.finish(turns)
                account.end(self._rank, epoch, self._wishes.log_stats)
