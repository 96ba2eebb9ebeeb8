"""The seam between a kind of samples and what reads them: datasets, mixtures and the feed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from loader.datasets.generators import RngKey
from loader.datasets.plain_values import Empty
from loader.reading.reader import ExtentReader, Ints


class Gather(Protocol):
    """Makes batches without a Python call per sample."""

    def locate(self, reader: ExtentReader, samples: Ints) -> tuple[Ints, ...]:
        """Return arrays by sample that say where samples lie; the last two are the first and the last extent."""
        ...

    def make(self, reader: ExtentReader, located: tuple[Ints, ...], empty: Empty | None) -> Any:
        """Make a batch of located samples, in new memory or in memory that `empty` returns for a size in bytes."""
        ...


class SampleReader(Protocol):
    """Makes samples of one catalog."""

    @property
    def sample_kind(self) -> str:
        """The kind of a sample, in words; equal for datasets whose samples fit into one batch."""
        ...

    def iter_samples(self, reader: ExtentReader, samples: Ints, rng_key: RngKey) -> Iterator[Any]:
        """Make samples one at a time: all bytes are read at once, and each sample is decoded and transformed on
        demand."""
        ...

    def expect(self, reader: ExtentReader, samples: Ints) -> None:
        """Start reading samples that come next; see `ExtentReader.expect`. Does nothing if a table in the extent says
        where samples lie."""
        ...

    def gather(self, collate: Callable[..., Any]) -> Gather | None:
        """Return what makes the batches that `collate` makes of these samples; None where each sample needs Python."""
        ...
