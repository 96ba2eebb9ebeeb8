"""What `iter()` of a loader gives: as torch's, it goes on after an exception."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple


class Raised(NamedTuple):
    """Handed on in a batch's place, to be raised."""

    error: Exception


class Iteration:
    """Batches of a generator. One that was raised out of a generator itself would have ended it."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch = next(self._batches)
        if not isinstance(batch, Raised):
            return batch
        if isinstance(batch.error, StopIteration):  # which would end the iteration, and nobody would hear why
            raise RuntimeError("what makes batches (a collate_fn, say) raised StopIteration") from batch.error
        raise batch.error
