"""Batches made in one pass over memory, with no Python call for each sample: records of one size as one tensor (as two
where tokens come with targets), samples that stay bytes as `Jagged`. A slab of them is located once; a batch then only
indexes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from loader.datasets.jagged import jagged
from loader.datasets.samples import SampleReader
from loader.reading.address_range import Bytes
from loader.reading.reader import Ints, Reader


@dataclass(frozen=True, slots=True)
class GatherMethod:
    """`locate` says where samples lie: arrays by sample, the last two of them the first and the last extent.
    `make` copies what is located to a batch, in new memory or in what its last argument gives for a size in bytes."""

    locate: Callable[[Reader, Ints], tuple[Ints, ...]]
    make: Callable[[Reader, Any, Callable[[int], Bytes] | None], Any]


def gather_method(
    samples: SampleReader, collate: Callable[..., Any], default_collation: bool
) -> GatherMethod | None:
    """How such batches of these samples are made, where they can be. `as_gathered`: nobody collates records."""
    if default_collation and samples.gathers_batches:
        return GatherMethod(samples.locate, samples.gather_batch)
    if collate is jagged and samples.stays_bytes:
        return GatherMethod(samples.ranges, samples.jagged)
    return None


class LocatedBatches:
    """The batches of consecutive turns, located."""

    def __init__(self, method: GatherMethod, reader: Reader, ids: Ints) -> None:
        """`ids`: of samples, [turns, batch size]."""
        *columns, first, last = method.locate(reader, ids.reshape(-1))
        self._make = method.make
        self._one_extent = last is first
        """Each sample lies in one extent."""
        arrays = [*columns, first] if self._one_extent else [*columns, first, last]
        self._arrays = [each.reshape(ids.shape) for each in arrays]

    def batch(self, reader: Reader, row: int, empty: Callable[[int], Bytes] | None) -> Any:
        """The batch of a row."""
        located = [each[row] for each in self._arrays]
        if self._one_extent:
            located.append(located[-1])
        return self._make(reader, located, empty)
