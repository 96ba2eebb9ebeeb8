"""Reads the values of a batch of rows out of the buffers of columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cachesvc.catalog.catalog import Catalog
from cachesvc.catalog.layout import Columns
from cachesvc.core.errors import CorruptData
from cachesvc.sources.columnar.column import ALL_NULL, NO_BUFFER, Column
from loader.reading.reader import ExtentReader, Ints

_VIEW_BYTES, _INLINE_BYTES = 16, 12
"""Of Arrow's views: their size, and the longest text that lies in one."""
_LEAST_BITS = {"view": 128, "fixed": 8, "text": 32, "list": 32, "bool": 1, "coded": 8}
"""The least bits that a value takes in its buffers, by kind."""
_MOST = 1 << 60
"""Of bytes and items, so that sums stay within int64."""


@dataclass(slots=True)
class Values:
    """The values of `count` rows. `valid`: which of them are not null; None if all are. `data` holds those alone:

    numbers and booleans as an array, fixed-size bytes as an array of void, text and constants as a list of bytes, a list
    as the length of each and the `Values` of all items, a struct as the `Values` of its fields.
    """

    count: int
    valid: npt.NDArray[np.bool_] | None
    data: Any


class ColumnFacts:
    """Facts of a catalog's extents and chunks that are computed once: there may be a million."""

    def __init__(self, catalog: Catalog, layout: Columns) -> None:
        self.starts, self.ends = catalog.extent_starts, catalog.extent_starts + catalog.extent_sizes
        self.largest_bits = 8 * int(catalog.extent_sizes.max(initial=0))
        self._address, self._stored = layout.chunk_address, dict[int, bool]()

    def is_stored(self, at: int) -> bool:
        """Tell whether any chunk has this buffer."""
        if at not in self._stored:
            self._stored[at] = bool((self._address[:, at] != NO_BUFFER).any())
        return self._stored[at]


class ColumnReader:
    """Reads columns of a catalog through one reader of extents."""

    def __init__(self, catalog: Catalog, layout: Columns, facts: ColumnFacts, reader: ExtentReader) -> None:
        self._catalog, self._layout, self._facts, self._reader = catalog, layout, facts, reader
        self._address = layout.chunk_address

    def read(self, column: Column, first: int, chunks: Ints, rows: Ints) -> Values:
        """Return the values of rows, each in its chunk. `first`: the number of the column's first buffer.

        Raises CorruptData for buffers that point outside their extent, and the errors of `ExtentReader.read`.
        """
        count = len(rows)
        if column.kind == "null":
            return Values(count, np.zeros(count, bool), np.zeros(0))
        if column.kind == "constant":
            return self._constants(self._address[chunks, first])
        stored = self._facts.is_stored(first)
        valid = self._validity(self._address[chunks, first], rows) if stored else None
        if valid is not None:
            chunks, rows = chunks[valid], rows[valid]
        child = first + column.own_buffers
        if column.kind == "coded":
            return self._decoded(
                count,
                valid,
                self.read(column.children[0], child, chunks, self._codes(column, first + 1, chunks, rows)),
            )
        return Values(count, valid, self._data(column, first + 1, child, chunks, rows))

    def _data(self, column: Column, at: int, child: int, chunks: Ints, rows: Ints) -> Any:
        kind = column.kind
        if kind == "bool":
            return self._bits(self._base(at, chunks), rows)
        if kind == "fixed":
            dtype = np.dtype(column.dtype)
            return self._fixed(self._places(self._base(at, chunks), rows, dtype.itemsize, chunks), dtype)
        if kind == "text":
            begins, lengths = self._spans(column, at, chunks, rows)
            begins = self._base(at + 1, chunks) + begins
            self._check(begins, lengths)
            return self._reader.read(begins, lengths)
        if kind == "view":
            return self._views(at, chunks, rows)
        if kind == "struct":
            found = []
            for each in column.children:
                found.append(self.read(each, child, chunks, rows))
                child += each.buffers
            return found
        if kind == "fixed list":
            lengths = np.full(len(rows), column.size)
            begins = self._places(np.zeros_like(rows), rows, column.size, chunks)
        else:
            begins, lengths = self._spans(column, at, chunks, rows)
        self._check_items(column.children[0], begins, lengths, chunks)
        inner = np.repeat(begins - np.cumsum(lengths) + lengths, lengths) + np.arange(int(lengths.sum()))
        return lengths, self.read(column.children[0], child, np.repeat(chunks, lengths), inner)

    def _views(self, at: int, chunks: Ints, rows: Ints) -> list[bytes | None]:
        """Return texts by their views: a length, and the text itself or its beginning and place."""
        places = self._places(self._base(at, chunks), rows, _VIEW_BYTES, chunks)
        raw = self._fixed(places, np.dtype("<i4"), _VIEW_BYTES).reshape(-1, 4)
        lengths = raw[:, 0].astype(np.int64)
        far = lengths > _INLINE_BYTES
        buffers = raw[far, 2].astype(np.int64)
        if (
            lengths.min(initial=0) < 0
            or buffers.min(initial=0) < 0
            or buffers.max(initial=0) >= self._address.shape[1]
        ):
            raise self._corrupt(chunks)
        columns = np.minimum(at + 1 + buffers, self._address.shape[1] - 1)
        begins = self._address[chunks[far], columns] + raw[far, 3]
        self._check(begins, lengths[far])
        away = iter(self._reader.read(begins, lengths[far]))
        inline = raw.tobytes()
        begin = _VIEW_BYTES * np.arange(len(rows)) + 4
        spans = zip(far.tolist(), begin.tolist(), lengths.tolist(), strict=True)
        return [next(away) if is_far else inline[low : low + size] for is_far, low, size in spans]

    def _constants(self, codes: Ints) -> Values:
        valid = codes >= 0
        found = [self._layout.constants[code].encode() for code in codes[valid].tolist()]
        return Values(len(codes), None if valid.all() else valid, found)

    def _validity(self, base: Ints, rows: Ints) -> npt.NDArray[np.bool_] | None:
        stored = base != NO_BUFFER
        if not stored.any():
            return None
        valid = base != ALL_NULL
        stored &= valid
        valid[stored] = self._bits(base[stored], rows[stored])
        return None if valid.all() else valid

    def _codes(self, column: Column, at: int, chunks: Ints, rows: Ints) -> Ints:
        if not self._facts.is_stored(at):
            return rows
        base = self._address[chunks, at]
        coded = base >= 0
        if not coded.any():
            return rows
        dtype = np.dtype(column.dtype)
        codes: Ints = rows.copy()
        codes[coded] = self._fixed(self._places(base[coded], rows[coded], dtype.itemsize, chunks), dtype)
        if codes.min(initial=0) < 0:
            raise self._corrupt(chunks)
        return codes

    def _decoded(self, count: int, valid: npt.NDArray[np.bool_] | None, found: Values) -> Values:
        """Return the values that codes name, of which some may be null, too."""
        if valid is not None and found.valid is not None:
            valid[valid] = found.valid
        return Values(count, found.valid if valid is None else valid, found.data)

    def _spans(self, column: Column, at: int, chunks: Ints, rows: Ints) -> tuple[Ints, Ints]:
        """Return the begins and lengths by a buffer of offsets."""
        dtype = np.dtype(column.dtype)
        places = self._places(self._base(at, chunks), rows, dtype.itemsize, chunks)
        found = self._fixed(places, dtype, 2 * dtype.itemsize)
        pairs = found.reshape(-1, 2).astype(np.int64)
        begins, lengths = pairs[:, 0], pairs[:, 1] - pairs[:, 0]
        if len(rows) and (
            begins.min() < 0 or lengths.min() < 0 or int(begins.max()) + int(lengths.max()) > _MOST
        ):
            raise self._corrupt(chunks)
        return begins, lengths

    def _check_items(self, item: Column, begins: Ints, lengths: Ints, chunks: Ints) -> None:
        """Raise CorruptData for lists of more items than an extent has room for, before memory is taken for them. The
        lists of a chunk do not overlap, though a batch may hold one of them several times."""
        while item.kind in ("struct", "fixed list") and item.children:
            item = item.children[0]
        most = self._facts.largest_bits // _LEAST_BITS.get(item.kind, 1)
        if lengths.max(initial=0) <= most and lengths.sum() <= most:
            return
        _, once = np.unique(np.stack([chunks, begins], axis=1), axis=0, return_index=True)
        if (
            lengths.max() > most
            or np.bincount(np.unique(chunks[once], return_inverse=True)[1], lengths[once]).max() > most
        ):
            raise self._corrupt(chunks)

    def _places(self, base: Ints, rows: Ints, width: int, chunks: Ints) -> Ints:
        """Return the places of items of a width. Raises CorruptData for numbers of items that no extent holds."""
        if int(rows.max(initial=0)) * width > _MOST:
            raise self._corrupt(chunks)
        return base + rows * width

    def _base(self, at: int, chunks: Ints) -> Ints:
        base: Ints = self._address[chunks, at]
        if base.min(initial=0) < 0:
            raise self._corrupt(chunks)
        return base

    def _bits(self, base: Ints, rows: Ints) -> npt.NDArray[np.bool_]:
        found: npt.NDArray[np.bool_] = (
            self._fixed(base + (rows >> 3), np.dtype(np.uint8)) >> (rows & 7) & 1
        ) > 0
        return found

    def _fixed(self, addresses: Ints, dtype: np.dtype[Any], width: int = 0) -> npt.NDArray[Any]:
        """Return the values at these addresses, one at each or as many as fill `width` bytes."""
        width = width or dtype.itemsize
        first = self._check(addresses, width)
        return self._reader.items(addresses, width, first).view(dtype)

    def _check(self, addresses: Ints, lengths: Ints | int) -> Ints:
        """Return the extents of ranges. Raises CorruptData for a range outside of all."""
        first = np.searchsorted(self._facts.starts, addresses, "right") - 1
        wrong = (first < 0) | (addresses + lengths > self._facts.ends[first])
        if wrong.any():
            raise CorruptData(
                f"{self._catalog.object(int(self._catalog.extent_objects[max(0, int(first[wrong][0]))])).uri} has values "
                "that point outside their chunk of rows: write the file anew"
            )
        return first

    def _corrupt(self, chunks: Ints) -> CorruptData:
        sample = int(self._layout.chunk_first[int(chunks[0])]) if len(chunks) else 0
        shard = self._catalog.key(sample).rpartition(":")[0]
        return CorruptData(
            f"{shard} in {self._catalog.uri} has lists or codes that point outside their chunk of rows: write it anew"
        )
