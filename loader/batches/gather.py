"""Batches made in one pass over memory, with no Python call for each sample: records of one size as one tensor (as two
where tokens come with targets), samples that stay bytes as `Jagged`. A slab of them is located once; a batch then only
indexes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from loader.datasets.jagged import jagged
from loader.datasets.samples import Samples
from loader.reading.address_range import Bytes
from loader.reading.reader import ExtentReader, Ints


@dataclass(frozen=True, slots=True)
class Whole:
    """`locate` says where samples lie: arrays by sample, the last two of them the first and the last extent.
    `make` copies what is located to a batch, in new memory or in what its last argument gives for a size in bytes."""

    locate: Callable[[ExtentReader, Ints], tuple[Ints, ...]]
    make: Callable[[ExtentReader, Any, Callable[[int], Bytes] | None], Any]


def whole(samples: Samples, collate: Callable[..., Any], as_gathered: bool) -> Whole | None:
    """How such batches of these samples are made, where they can be. `as_gathered`: nobody collates records."""
    if as_gathered and samples.ready:
        return Whole(samples.locate, samples.whole)
    if collate is jagged and samples.stays_bytes:
        return Whole(samples.ranges, samples.jagged)
    return None


class Located:
    """The batches of consecutive turns, located."""

    def __init__(self, kind: Whole, reader: ExtentReader, ids: Ints) -> None:
        """`ids`: of samples, [turns, batch size]."""
        *places, first, last = kind.locate(reader, ids.reshape(-1))
        self._make = kind.make
        self._in_one = last is first
        """Each sample lies in one extent."""
        arrays = [*places, first] if self._in_one else [*places, first, last]
        self._arrays = [each.reshape(ids.shape) for each in arrays]

    def batch(self, reader: ExtentReader, row: int, empty: Callable[[int], Bytes] | None) -> Any:
        """The batch of a row."""
        located = [each[row] for each in self._arrays]
        if self._in_one:
            located.append(located[-1])
        return self._make(reader, located, empty)
