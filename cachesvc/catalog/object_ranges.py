"""Finds the extent of a catalog that holds a byte of an object."""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

import numpy as np

from cachesvc.catalog.catalog import Catalog
from cachesvc.catalog.columns import MappedTexts
from cachesvc.core.model import ObjectVersion


class HeldRange(NamedTuple):
    """The bytes [begin, end) of an object, at offset `at` of an extent."""

    extent: int
    at: int
    begin: int
    end: int


def range_of(catalog: Catalog, version: ObjectVersion, offset: int) -> HeldRange | None:
    """Return the range of an object that holds a byte, in O(log n). None where no extent has it, or one of another version;
    and for a catalog that is not `in_object_order`."""
    prefix, columns = catalog.uri_prefix, catalog.columns
    if not version.uri.startswith(prefix) or not catalog.in_object_order:
        return None
    uris, name = MappedTexts(columns, "object.uri"), version.uri[len(prefix) :]
    index = bisect_left(uris, name)
    if index == len(uris) or uris[index] != name or catalog.object(index) != version:
        return None
    offsets, lengths, starts = columns["piece.offset"], columns["piece.length"], columns["extent.piece"]
    first, last = np.searchsorted(columns["piece.object"], [index, index + 1]).tolist()
    piece = first + int(np.searchsorted(offsets[first:last], offset, "right")) - 1
    if piece < first or offset >= (end := int(offsets[piece]) + int(lengths[piece])):
        return None
    extent = int(np.searchsorted(starts, piece, "right")) - 1
    at = int(lengths[int(starts[extent]) : piece].sum())
    return HeldRange(extent, at, int(offsets[piece]), end)
