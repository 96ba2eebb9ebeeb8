"""Bad samples: those whose bytes cannot be had for good, do not decode, or whose transform raises.

A bad sample is found when its batch fails, by halving the batch, so good batches pay nothing. Where an object is gone or
corrupt, each sample in it is bad. What a `collate_fn` raises over
samples that are good is raised as it is.

- `skip` leaves it out: the batch is shorter and `valid` counts what is left. A batch of which nothing is left
  holds one substitute and `valid` is 0, so the number of steps stays the same and no shape is empty;
- `substitute` puts another sample in its place, chosen by `core/order/substitutes.py`. It counts as valid.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from cachesvc.core.errors import CacheError, CorruptData, NotFound, SourceChanged
from cachesvc.core.order.substitutes import substitutes
from loader.batches.feed import Feed
from loader.reading.reader import Ints

OnError = Literal["raise", "skip", "substitute"]
_PERMANENT = (NotFound, CorruptData, SourceChanged)
_CAUSE_CHARS = 500
MAX_KEPT, MAX_LOGGED = 1000, 20
"""Bad samples of an epoch that are kept and logged; all are counted."""
_log = logging.getLogger("cachesvc")


class BadSample(NamedTuple):
    """`sample`: its index in the dataset; `key`: its key in the source ("" where it has none)."""

    epoch: int
    sample: int
    key: str
    cause: str


@dataclass(frozen=True, slots=True)
class BatchRepair:
    """A batch of `turn` that was mended: the indices in it, how many of them (the first) are real."""

    epoch: int
    turn: int
    indices: Ints
    valid: int
    bad: tuple[BadSample, ...]


def is_bad_sample(error: Exception) -> bool:
    """Whether an error belongs to the sample: permanent, or of the user's code. A daemon or a source that is
    away, no room, a wrong argument: these would be mended at another time."""
    if isinstance(error, CacheError):
        return error.of_object or isinstance(error, _PERMANENT)
    return not isinstance(error, MemoryError)


class RepairingFeed:
    """Batches of a feed under an `on_error`. Picklable; threads may share one."""

    def __init__(self, feed: Feed, on_error: OnError) -> None:
        self._feed, self._on_error = feed, on_error

    def make(self, key: tuple[int, int]) -> tuple[Any, BatchRepair | None]:
        """The batch of a turn, and what was mended in it. Raises what is no bad sample's."""
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
        self._try_by_halves(epoch, indices, list(range(len(indices))), good, bad)
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
            return self._feed.fetch(epoch, repaired), repair
        except Exception as retry_error:  # of a transform that fails by chance, what it made before will do
            if not is_bad_sample(retry_error):
                raise
            return self._feed.collated([good[row] for row in sorted(good)]), repair

    def _try_by_halves(
        self, epoch: int, indices: Ints, rows: list[int], good: dict[int, Any], bad: dict[int, Exception]
    ) -> None:
        """Make the samples at `places`, by halves where one of them fails, and find out which fail alone."""
        found = self._samples_or_error(epoch, indices[rows])
        if not isinstance(found, Exception):
            good.update(zip(rows, found, strict=True))
        elif len(rows) == 1:
            bad[rows[0]] = found
        else:
            half = len(rows) // 2
            self._try_by_halves(epoch, indices, rows[:half], good, bad)
            self._try_by_halves(epoch, indices, rows[half:], good, bad)

    def _samples_or_error(self, epoch: int, indices: Ints) -> list[Any] | Exception:
        try:
            return self._feed.take(epoch, indices)  # without collation: what fails there is no sample's fault
        except Exception as error:
            if not is_bad_sample(error):
                raise
            return error

    def _substitute(
        self, epoch: int, turn: int, batch_size: int, row: int, error: Exception
    ) -> tuple[int, Any]:
        """The index that stands in for the sample at `at` of a batch of so many rows, and that sample. Raises CorruptData
        when all tried are bad."""
        feed, spec, order = self._feed, self._feed.spec, self._feed.order(epoch)
        step, micro = divmod(turn, feed.share.accumulate)
        nth = (feed.share.low // feed.share.batch_size + micro) * batch_size + row
        position = step * spec.global_batch + nth  # behind all others for a repeat in the last batch
        positions = order.full_steps * spec.global_batch or order.tail_samples
        for candidate in substitutes(spec.seed, epoch, position, spec.global_batch, positions):
            index = feed.index_at(epoch, candidate)
            found = self._samples_or_error(epoch, np.asarray([index], np.int64))
            if not isinstance(found, Exception):
                return index, found[0]
        raise CorruptData(
            f"no good sample was found to stand in for a bad one ({error}); mend the data, or use on_error='raise'"
        ) from error

    def _bad_sample(self, epoch: int, index: int, error: Exception) -> BadSample:
        cause = f"{type(error).__name__}: {error}".partition("\n")[0][:_CAUSE_CHARS]
        return BadSample(epoch, index, self._feed.key_of(index), cause)


class BadSampleLog:
    """The bad samples of the latest epoch: counted, the latest of them kept, the first of them logged."""

    def __init__(self) -> None:
        self.count = 0
        self.kept: deque[BadSample] = deque(maxlen=MAX_KEPT)

    def record(self, repair: BatchRepair) -> None:
        """A mended batch was handed over."""
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
