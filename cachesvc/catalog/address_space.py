"""Lays out the address space of a dataset: extents one after another, each made of pieces of objects."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from math import lcm

import numpy as np

from cachesvc.catalog.columns import Array, TextColumn, ints
from cachesvc.core.errors import InvalidInput
from cachesvc.core.model import (
    HUGE_BYTES,
    MAX_EXTENTS,
    PAGE_BYTES,
    Extent,
    ObjectVersion,
    Piece,
    extent_of,
)

CODECS = ("", "zstd", "gzip", "bz2", "lz4")
"""The codecs that every catalog knows by number. Others follow, in its head: they name what is decoded, too."""


def aligned(address: int, multiple: int) -> int:
    """Return the next multiple at or after an address."""
    return -(-address // multiple) * multiple


def unit(record_bytes: int, limit_bytes: int) -> int:
    """Return the distance at which records and pages begin together: huge pages where that is within the limit."""
    huge = lcm(record_bytes, HUGE_BYTES)
    return huge if huge <= limit_bytes else lcm(record_bytes, PAGE_BYTES)


class AddressSpace:
    """Lays out extents of `objects` (by index) as columns: 25 bytes a piece, 41 where pieces are decoded parts of objects.

    Raises InvalidInput before there are more than `MAX_EXTENTS`. Callers choose the extent size, and a sparse file may
    have any size, so only this limit bounds the memory.
    """

    def __init__(self, objects: Sequence[ObjectVersion]) -> None:
        self.objects = objects
        self.codecs = list(CODECS)
        self.end = 0
        self._piece_object, self._piece_offset = array("q"), array("q")
        self._piece_length, self._piece_codec = array("q"), array("B")
        self._piece_stored, self._piece_tail = array("q"), array("q")
        self._hashes = TextColumn()  # of the first pieces; those behind the last hash have none
        self._extent_piece, self.sizes, self.starts = array("q", [0]), array("q"), array("q")

    def __len__(self) -> int:
        return len(self.sizes)

    def add(self, pieces: Iterable[tuple[int, int, int]], codec: str = "", hash: str = "") -> int:
        """Add one extent of (object index, offset, length) pieces and return its start address.

        It starts at a huge page where it fills one, else at a page. `hash`: of the last piece (see `Piece`).
        """
        size = 0
        for index, offset, length in pieces:
            self._piece(index, offset, length, codec)
            size += length
        if hash:
            self._hashes.extend([""] * (len(self._piece_object) - 1 - len(self._hashes)))
            self._hashes.append(hash)
        self.end = aligned(self.end, unit(1, size))
        return self._extent(size)

    def add_packed(self, pieces: Iterable[tuple[tuple[int, int, int], str, int]]) -> int:
        """Add one extent of pieces, each with its codec and its stored size (0 for a plain one), and return its start
        address."""
        given = list(pieces)
        size = sum(piece[2] for piece, _, _ in given)
        for piece, codec, stored in given:
            self._piece(*piece, codec, stored)
        self.end = aligned(self.end, unit(1, size))
        return self._extent(size)

    def add_encoded(self, piece: tuple[int, int, int], codec: str, stored: int, tail: int) -> int:
        """Add one extent that is decoded from a part of an object (see `Piece`) and return its start address."""
        self.end = aligned(self.end, unit(1, piece[2]))
        self._piece(*piece, codec, stored, tail)
        return self._extent(piece[2])

    def add_run(self, index: int, offset: int, length: int, cut: int, stride: int = 1) -> int:
        """Add bytes [offset, offset + length) of an object as consecutive extents of `cut` bytes; return the start address.

        `cut` is a multiple of the page. The run starts where a record of `stride` bytes and a page begin together.
        """
        self._check_room(-(-length // cut), cut)
        self.end = start = aligned(self.end, unit(stride, length))
        for begin in range(0, length, cut):
            size = min(cut, length - begin)
            self._piece(index, offset + begin, size, "")
            self._extent(size)
        return start

    def _piece(
        self, index: int, offset: int, length: int, codec: str, stored: int = 0, tail: int = 0
    ) -> None:
        self._piece_object.append(index)
        self._piece_offset.append(offset)
        self._piece_length.append(length)
        if codec not in self.codecs:
            self.codecs.append(codec)
        self._piece_codec.append(self.codecs.index(codec))
        self._piece_stored.append(stored)
        self._piece_tail.append(tail)

    def _extent(self, size: int) -> int:
        """Make an extent of the pieces added since the last one, at `end`."""
        self._check_room(1, max(self.sizes) if len(self) == MAX_EXTENTS else size)
        start = self.end
        self._extent_piece.append(len(self._piece_object))
        self.starts.append(start)
        self.sizes.append(size)
        self.end = start + size
        return start

    def _check_room(self, more: int, cut: int) -> None:
        """Raise InvalidInput where `more` extents, of at most `cut` bytes, would exceed the limit."""
        if len(self) + more > MAX_EXTENTS:
            total = sum(version.size_bytes for version in self.objects)
            enough = aligned(2 * max(total // MAX_EXTENTS, cut), PAGE_BYTES)  # few extents are full
            raise InvalidInput(
                f"{self.objects[0].uri} and the data opened with it: {total:,} bytes would be more than {MAX_EXTENTS:,} "
                f"extents; raise extent_bytes= to {enough}, or write fewer and larger files (or shards, or row groups)"
            )

    def extents(self) -> Iterator[Extent]:
        """Yield every extent with its pieces, in address order."""
        for index in range(len(self)):
            yield extent_of(
                Piece(
                    self.objects[self._piece_object[at]],
                    self._piece_offset[at],
                    self._piece_length[at],
                    self.codecs[self._piece_codec[at]],
                    self._piece_stored[at],
                    self._piece_tail[at],
                    self._hashes[at] if at < len(self._hashes) else "",
                )
                for at in range(self._extent_piece[index], self._extent_piece[index + 1])
            )

    def columns(self) -> dict[str, Array]:
        """Return the columns of a catalog; ids and stored sizes follow from the pieces."""
        ids, stored = bytearray(), array("q")
        for extent in self.extents():
            ids += extent.id
            stored.append(extent.stored_bytes)
        if len(self._hashes):
            self._hashes.extend([""] * (len(self._piece_object) - len(self._hashes)))
        parts = {"piece.stored": ints(self._piece_stored), "piece.tail": ints(self._piece_tail)}
        return {
            **(parts if any(self._piece_stored) else {}),
            **(self._hashes.columns("piece.hash") if len(self._hashes) else {}),
            "piece.object": ints(self._piece_object),
            "piece.offset": ints(self._piece_offset),
            "piece.length": ints(self._piece_length),
            "piece.codec": np.frombuffer(self._piece_codec, np.uint8),
            "extent.piece": ints(self._extent_piece),
            "extent.size": ints(self.sizes),
            "extent.start": ints(self.starts),
            "extent.stored": ints(stored),
            "extent.id": np.frombuffer(ids, np.uint8),
        }
