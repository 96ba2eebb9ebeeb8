"""Maps samples of a catalog to the objects that hold them, without reading data, and keys to samples."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from cachesvc.catalog.catalog import Catalog
from cachesvc.catalog.columns import Ints
from cachesvc.catalog.layout import Columns, Fixed, Indirect
from cachesvc.core.safe_text import redacted

T = TypeVar("T")


class SamplePlace(NamedTuple):
    """Bytes [begin, end) of an object. Of a compressed object they are those of its content. Where only the object's own
    index tells the bytes (MDS, litData, Parquet, Arrow), `begin` and `end` are -1 and `row` is the sample's number in the
    object; -1 otherwise."""

    object: str
    begin: int
    end: int
    row: int = -1


class NamedSample(NamedTuple):
    """A sample's key, "" without one, and the bytes that hold it. A pack has the keys of its `documents` in its place."""

    key: str
    places: tuple[SamplePlace, ...]
    documents: tuple[str, ...] = ()


def places_of(catalog: Catalog, samples: Ints) -> list[tuple[SamplePlace, ...]]:
    """The places of samples, int64[n]: one for each object that a sample has bytes in. URIs are without secrets."""
    if isinstance(catalog.layout, (Columns, Indirect)):
        return [(_row_place(catalog, sample),) for sample in samples.tolist()]
    addresses, lengths = catalog.locate(samples)
    stored = _StoredPieces(catalog)
    return [
        _merged(
            place
            for address, length in zip(*fields, strict=True)
            if length >= 0
            for place in stored.at(address, address + length)
        )
        for fields in zip(addresses.tolist(), lengths.tolist(), strict=True)
    ]


def address_places(catalog: Catalog, begin: Ints, end: Ints) -> list[tuple[SamplePlace, ...]]:
    """The places of ranges [begin[i], end[i]) of the address space."""
    stored = _StoredPieces(catalog)
    return [_merged(stored.at(*pair)) for pair in zip(begin.tolist(), end.tolist(), strict=True)]


def grouped(row: Ints, items: Sequence[tuple[T, ...]], rows: int) -> list[tuple[T, ...]]:
    """The items of each of `rows` rows, where `items[i]` are of row `row[i]`."""
    found: list[list[T]] = [[] for _ in range(rows)]
    for at, some in zip(row.tolist(), items, strict=True):
        found[at] += some
    return [*map(tuple, found)]


def samples_with_key(catalog: Catalog, key: str) -> list[int]:
    """The samples of a key (see `Catalog.key`), ascending; several where names repeat."""
    if "key.end" in catalog.columns:
        return [*_with_stored_key(catalog, key.encode("utf-8", "surrogateescape"))]
    shard, _, ordinal = key.rpartition(":")
    if not (ordinal.isascii() and ordinal.isdigit()):
        return []
    firsts = _firsts(catalog, shard)
    found = (first + int(ordinal) for first in firsts)
    return [sample for sample in found if sample < catalog.samples and catalog.key(sample) == key]


def _firsts(catalog: Catalog, shard: str) -> Iterator[int]:
    """The first samples of the objects of a name."""
    if isinstance(catalog.layout, Fixed):
        firsts, objects = catalog.layout.runs_first, catalog.columns["run.object"]
    else:
        firsts, objects = catalog.extent_first[:-1], catalog.extent_objects
    for row in np.flatnonzero(np.diff(objects, prepend=objects[:1] - 1)).tolist():
        if catalog.shard(int(objects[row])) == shard:
            yield int(firsts[row])


def _with_stored_key(catalog: Catalog, key: bytes) -> Iterator[int]:
    text, ends = catalog.columns["key.text"], catalog.columns["key.end"]
    pattern, memory, at = re.compile(re.escape(key)), text.data, 0
    while key and (match := pattern.search(memory, at)):
        at = match.start()
        row = int(np.searchsorted(ends, at, side="right"))
        if (int(ends[row - 1]) if row else 0) == at and int(ends[row]) == match.end():
            yield row
        at += 1


def _row_place(catalog: Catalog, sample: int) -> SamplePlace:
    extent = int(np.searchsorted(catalog.extent_first, sample, side="right")) - 1
    number = int(catalog.extent_objects[extent])
    first = int(catalog.extent_first[np.searchsorted(catalog.extent_objects, number)])
    return SamplePlace(redacted(catalog.object(number).uri), -1, -1, sample - first)


class _StoredPieces:
    """The pieces of extents by address. Many small files are pieces of one extent, so their addresses are kept."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._starts: dict[int, Ints] = {}

    def at(self, begin: int, end: int) -> Iterator[SamplePlace]:
        """The places of the bytes [begin, end); an empty range has one."""
        extents = self._catalog.extent_starts
        extent = int(np.searchsorted(extents, begin, side="right")) - 1
        last = max(extent + 1, int(np.searchsorted(extents, end, side="left")))
        for number in range(max(0, extent), last):
            starts = self._starts_of(number)
            first_piece = int(self._catalog.columns["extent.piece"][number])
            low = max(0, int(np.searchsorted(starts, begin, side="right")) - 1)
            for at in range(low, max(low + 1, int(np.searchsorted(starts, end, side="left")))):
                if at == starts.size - 1:  # behind the last piece
                    break
                start, stop = max(begin, int(starts[at])), min(end, int(starts[at + 1]))
                piece = self._catalog.piece(first_piece + at)
                shift = piece.offset - int(starts[at])
                within = (start + shift, stop + shift)
                if piece.codec and piece.stored:
                    within = (piece.offset, piece.offset + piece.stored)
                yield SamplePlace(redacted(piece.object.uri), *within)

    def _starts_of(self, extent: int) -> Ints:
        """The address of each piece of an extent, and its end."""
        if extent not in self._starts:
            first, last = self._catalog.columns["extent.piece"][extent : extent + 2].tolist()
            ends = np.cumsum(self._catalog.columns["piece.length"][first:last])
            self._starts[extent] = np.concatenate(([0], ends)) + int(self._catalog.extent_starts[extent])
        return self._starts[extent]


def _merged(places: Iterator[SamplePlace]) -> tuple[SamplePlace, ...]:
    """One place for each object: from the first byte to the last."""
    found: dict[str, SamplePlace] = {}
    for place in places:
        before = found.get(place.object, place)
        found[place.object] = SamplePlace(
            place.object, min(before.begin, place.begin), max(before.end, place.end)
        )
    return tuple(found.values())
