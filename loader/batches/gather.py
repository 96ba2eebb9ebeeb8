"""Makes batches in one pass over memory, without a Python call per sample.

Records of one size become one tensor (two where tokens have targets), rows of columns a batch of each column; samples
that stay bytes become a `Jagged`.
The samples of a whole slab are located at once, so that a batch only indexes arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from loader.datasets.jagged import jagged
from loader.datasets.samples import SampleReader
from loader.reading.address_range import Bytes
from loader.reading.reader import ExtentReader, Ints


@dataclass(frozen=True, slots=True)
class GatherMethod:
    """`locate` returns arrays by sample that say where samples lie; the last two are the first and the last extent.
    `make` copies located samples into a batch, in new memory or in the memory that its last argument returns for a
    size."""

    locate: Callable[[ExtentReader, Ints], tuple[Ints, ...]]
    make: Callable[[ExtentReader, Any, Callable[[int], Bytes] | None], Any]


def gather_method(
    samples: SampleReader, collate: Callable[..., Any], default_collation: bool
) -> GatherMethod | None:
    """Return the method that gathers batches of these samples, or None where each sample needs Python."""
    if default_collation and samples.gathers_batches:
        return GatherMethod(samples.locate, samples.gather_batch)
    if default_collation and samples.collates_columns:
        return GatherMethod(lambda _, ids: (ids, ids, ids), samples.column_batch)
    if collate is jagged and samples.stays_bytes:
        return GatherMethod(samples.ranges, samples.jagged)
    return None


class LocatedBatches:
    """The batches of consecutive turns, with the places of their samples."""

    def __init__(self, method: GatherMethod, reader: ExtentReader, ids: Ints) -> None:
        """`ids`: samples of the catalog, [turns, batch size]."""
        *columns, first, last = method.locate(reader, ids.reshape(-1))
        self._make = method.make
        self._one_extent = last is first
        """Each sample lies in a single extent."""
        arrays = [*columns, first] if self._one_extent else [*columns, first, last]
        self._arrays = [each.reshape(ids.shape) for each in arrays]

    def batch(self, reader: ExtentReader, row: int, empty: Callable[[int], Bytes] | None) -> Any:
        """Make the batch of a row."""
        located = [each[row] for each in self._arrays]
        if self._one_extent:
            located.append(located[-1])
        return self._make(reader, located, empty)
