"""Bad samples: their bytes are permanently unreadable, they do not decode, or their transform raises.

A batch that fails is halved until the bad samples are found, so good batches cost nothing extra. Each sample of an
object that is gone or corrupt is bad. An error that `collate_fn` raises over good samples is raised unchanged.

- `skip` leaves the sample out: the batch is shorter, and `valid` counts the remaining samples. If none remains, the
  batch holds one substitute and `valid` is 0. The number of steps stays the same, and no batch is empty.
- `substitute` puts another sample in its place, chosen by `core/order/substitutes.py`. It counts as valid.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from cachesvc.core.errors import CorruptData, is_bad_sample
from cachesvc.core.order.substitutes import substitutes
from loader.batches.feed import Feed
from loader.reading.reader import Ints

OnError = Literal["raise", "skip", "substitute"]
_CAUSE_CHARS = 500
MAX_KEPT, MAX_LOGGED = 1000, 20
"""Limits of one epoch. Every bad sample is counted."""
_log = logging.getLogger("cachesvc")


class BadSample(NamedTuple):
    """`sample` is the index in the dataset, `key` the key in the source ("" without one)."""

    epoch: int
    sample: int
    key: str
    cause: str


@dataclass(frozen=True, slots=True)
class BatchRepair:
    """A batch of `turn` without its bad samples. `indices` are its samples; the first `valid` of them are real."""

    epoch: int
    turn: int
    indices: Ints
    valid: int
    bad: tuple[BadSample, ...]


class RepairingFeed:
    """Batches of a feed, with bad samples handled by `on_error`. Picklable; threads may share one."""

    def __init__(self, feed: Feed, on_error: OnError) -> None:
        self._feed, self._on_error = feed, on_error

    def make(self, key: tuple[int, int]) -> tuple[Any, BatchRepair | None]:
        """Return the batch of a turn, and its repair if it had bad samples. Raises errors that no sample caused."""
        try:
            return self._feed[key], None
        except Exception as error:
            if self._on_error == "raise" or not is_bad_sample(error):
                raise
            failure = error
        return self._repaired(*key, failure)

    def _repaired(self, epoch: int, turn: int, error: Exception) -> tuple[Any, BatchRepair]:
        indices, valid = self._feed.indices(epoch, turn)
        good: dict[int, Any] = {}
        bad: dict[int, Exception] = {}
        self._try_by_halves((epoch, turn), indices, list(range(len(indices))), good, bad)
        kept = sorted(good)
        real = sum(row < valid for row in kept)
        repaired = indices.copy()
        if self._on_error == "substitute":
            for row in sorted(bad):
                repaired[row], good[row] = self._substitute(epoch, turn, len(indices), row, bad[row])
            real = valid
        elif kept:
            repaired = repaired[kept]
        else:
            repaired[0], good[0] = self._substitute(epoch, turn, len(indices), 0, error)
            repaired = repaired[:1]
        reported = tuple(
            self._bad_sample(epoch, int(indices[row]), bad[row]) for row in sorted(bad) if row < valid
        )
        repair = BatchRepair(epoch, turn, repaired, real, reported)
        try:
            return self._feed.fetch((epoch, turn), repaired), repair
        except Exception as retry_error:  # a transform that fails at random: use the samples it made before
            if not is_bad_sample(retry_error):
                raise
            return self._feed.collated([good[row] for row in sorted(good)]), repair

    def _try_by_halves(
        self,
        key: tuple[int, int],
        indices: Ints,
        rows: list[int],
        good: dict[int, Any],
        bad: dict[int, Exception],
    ) -> None:
        """Make the samples of `rows`, halving the rows while one of them fails. Fills `good` and `bad` by row."""
        found = self._samples_or_error(key, indices[rows])
        if not isinstance(found, Exception):
            good.update(zip(rows, found, strict=True))
        elif len(rows) == 1:
            bad[rows[0]] = found
        else:
            half = len(rows) // 2
            self._try_by_halves(key, indices, rows[:half], good, bad)
            self._try_by_halves(key, indices, rows[half:], good, bad)

    def _samples_or_error(self, key: tuple[int, int], indices: Ints) -> list[Any] | Exception:
        try:
            return self._feed.take(key, indices)  # not collated: collate_fn errors are no sample's fault
        except Exception as error:
            if not is_bad_sample(error):
                raise
            return error

    def _substitute(
        self, epoch: int, turn: int, batch_size: int, row: int, error: Exception
    ) -> tuple[int, Any]:
        """Return the index and the sample that replace row `row` of a batch. Raises CorruptData when every
        candidate is bad."""
        feed, spec, order = self._feed, self._feed.spec, self._feed.order(epoch)
        step, micro = divmod(turn, feed.share.accumulate)
        nth = (feed.share.low // feed.share.batch_size + micro) * batch_size + row
        position = step * spec.global_batch + nth  # a repeat in the last batch lies past all real positions
        positions = order.full_steps * spec.global_batch or order.tail_samples
        for candidate in substitutes(spec.seed, epoch, position, spec.global_batch, positions):
            index = feed.orders.index_at(order, candidate)
            if feed.orders.is_excluded(index, epoch):
                continue
            found = self._samples_or_error((epoch, turn), np.asarray([index], np.int64))
            if not isinstance(found, Exception):
                return index, found[0]
        raise CorruptData(
            f"no good sample was found to replace a bad one ({error}); repair the data, or use on_error='raise'"
        ) from error

    def _bad_sample(self, epoch: int, index: int, error: Exception) -> BadSample:
        cause = f"{type(error).__name__}: {error}".partition("\n")[0][:_CAUSE_CHARS]
        return BadSample(epoch, index, self._feed.key_of(index), cause)


class BadSampleLog:
    """The bad samples of the latest epoch: all are counted, the latest are kept, the first are logged."""

    def __init__(self) -> None:
        self.count = 0
        self.kept: deque[BadSample] = deque(maxlen=MAX_KEPT)

    def record(self, repair: BatchRepair) -> None:
        """Record the bad samples of a batch that was handed over."""
        for bad in repair.bad:
            self.count += 1
            self.kept.append(bad)
            if self.count <= MAX_LOGGED:
                _log.warning(
                    "sample %d%s of epoch %d is bad: %s",
                    bad.sample,
                    bad.key and f" ({bad.key})",
                    bad.epoch,
                    bad.cause,
                )
            elif self.count == MAX_LOGGED + 1:
                _log.warning("more bad samples in epoch %d: see bad_samples and stats()", bad.epoch)
