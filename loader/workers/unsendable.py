"""Turns what does not cross from a worker to its trainer into a typed error of its batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cachesvc.core.errors import InvalidInput
from loader.batches.feed import Feed
from loader.batches.maker import MadeBatch
from loader.batches.turns import BatchKey
from loader.process.pickled import pickled
from loader.workers.shared_batches import SentBatch

PLAIN_VALUES = (
    "return tensors, arrays, numbers and text from your transform or collate_fn (of an image: its pixels), or give"
    " worker_type='thread'"
)


def unsendable(made: MadeBatch, feed: Feed, turn: BatchKey, error: Exception) -> MadeBatch:
    """Return the batch of a turn as a failure: it does not pickle. The error names the sample, if that is known."""
    return _failed(
        made, f"{_culprit(made.batch, feed, turn)} cannot be sent from its worker to the trainer", error
    )


def opened(made: MadeBatch) -> MadeBatch:
    """Return a worker's batch, in the trainer, or a failure if it does not unpickle."""
    if not isinstance(made.batch, SentBatch):
        return made
    try:
        return made._replace(batch=made.batch.open())
    except Exception as error:  # noqa: BLE001  values of any class unpickle themselves
        return _failed(made, "a batch does not unpickle in the trainer", error)


def _failed(made: MadeBatch, what: str, error: Exception) -> MadeBatch:
    cause = f"{type(error).__name__}: {' '.join(str(error).split())}"
    failure = InvalidInput.code, f"{what}: {cause}; {PLAIN_VALUES}"
    return MadeBatch(None, replace(made.report, failure=failure))


def _culprit(batch: Any, feed: Feed, turn: BatchKey) -> str:
    """Name the sample that does not pickle in a list of samples, otherwise the batch."""
    indices = feed.indices(*turn)[0]
    if type(batch) is list and len(batch) == len(indices):
        for index, sample in zip(indices.tolist(), batch, strict=True):
            try:
                pickled(sample)
            except Exception:  # noqa: BLE001  values of any class pickle themselves
                return feed.key_of(index) or f"sample {index}"
    return f"batch {turn.turn} of epoch {turn.epoch}"
