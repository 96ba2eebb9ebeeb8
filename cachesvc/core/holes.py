"""Holes: the pieces of an extent that cannot be read for a permanent reason, while the rest of it is there.

An extent of many small files is filled without those that are gone, overwritten, unreadable or damaged. A grant names these
pieces and why they are missing, so that a reader never takes their bytes for data.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple

from cachesvc.core.errors import CacheError, CorruptData, NotAllowed, NotFound, SourceChanged, from_code
from cachesvc.core.model import Extent

PERMANENT = (NotFound, NotAllowed, SourceChanged, CorruptData)
"""Permanent errors of one object."""
MAX_TEXT_CHARS = 1500
"""Limit of the text that names a grant's holes, about 200 of them: a grant is one datagram. An extent with more holes is
not filled."""
_WHY = {
    NotFound.code: "is gone: restore it, then open the dataset again",
    NotAllowed.code: "may not be read: allow it, then open the dataset again",
    SourceChanged.code: "was overwritten: open the dataset again",
    CorruptData.code: "is damaged: write it again, then open the dataset again",
}


class Hole(NamedTuple):
    """The index of a piece in its extent, and the code of its error."""

    piece: int
    code: int


def encode(holes: Iterable[Hole]) -> str:
    """Holes as text without spaces; empty where there are none."""
    return ",".join(f"{hole.piece}:{hole.code}" for hole in sorted(holes))


def decode(text: str) -> tuple[Hole, ...]:
    """The inverse of `encode`. Raises ValueError for other text."""
    pairs = (each.split(":") for each in text.split(",") if text)
    return tuple(Hole(int(piece), int(code)) for piece, code in pairs)


class Holes:
    """The byte ranges of one copy's holes."""

    def __init__(self, extent: Extent, text: str) -> None:
        """Parse a grant's text. Raises ValueError or IndexError where it does not fit the extent."""
        ends = list(accumulate(piece.length for piece in extent.pieces))
        self._holes = decode(text)
        self._uris = [extent.pieces[hole.piece].object.uri for hole in self._holes]
        self._ends = [ends[hole.piece] for hole in self._holes]
        self._begins = [ends[hole.piece] - extent.pieces[hole.piece].length for hole in self._holes]

    def check(self, offset: int, size_bytes: int) -> None:
        """Raise the error of the first hole in [offset, offset + size_bytes) of the extent. It names the object."""
        at = bisect_right(self._ends, offset)
        if at < len(self._ends) and self._begins[at] < offset + size_bytes:
            raise error_of(self._holes[at], self._uris[at])


def error_of(hole: Hole, uri: str) -> CacheError:
    """The error for a read that touches a hole of the object `uri`."""
    error = from_code(hole.code, f"{uri} {_WHY.get(hole.code, 'cannot be read')}")
    error.of_object = True
    return error
