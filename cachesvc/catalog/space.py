"""The address space while it is laid out: extents one after another, each made of pieces of objects."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from cachesvc.catalog.columns import Array, ints
from cachesvc.core.model import PAGE_BYTES, Extent, ObjectVersion, Piece, extent_of

CODECS = ("", "zstd")


def aligned(address: int, multiple: int) -> int:
    """The next multiple at or after an address."""
    return -(-address // multiple) * multiple


class Space:
    """Lays out extents of `objects` (by index) and remembers them as columns: 25 bytes a piece."""

    def __init__(self, objects: Sequence[ObjectVersion]) -> None:
        self.objects = objects
        self.end = 0
        self._piece_object, self._piece_offset = array("q"), array("q")
        self._piece_length, self._piece_codec = array("q"), array("B")
        self._extent_piece, self.sizes, self.starts = array("q", [0]), array("q"), array("q")

    def __len__(self) -> int:
        return len(self.sizes)

    def add(self, pieces: Iterable[tuple[int, int, int]], codec: str = "") -> int:
        """One extent of (object index, offset, length) pieces at the next page; its start address."""
        size = 0
        for index, offset, length in pieces:
            self._piece_object.append(index)
            self._piece_offset.append(offset)
            self._piece_length.append(length)
            self._piece_codec.append(CODECS.index(codec))
            size += length
        start = aligned(self.end, PAGE_BYTES)
        self._extent_piece.append(len(self._piece_object))
        self.starts.append(start)
        self.sizes.append(size)
        self.end = start + size
        return start

    def add_run(self, index: int, offset: int, length: int, cut: int, alignment: int = PAGE_BYTES) -> int:
        """Bytes [offset, offset + length) of an object as consecutive extents of `cut` bytes (a multiple of
        the page), contiguous from a multiple of `alignment`; the start address."""
        self.end = start = aligned(self.end, alignment)
        for begin in range(0, length, cut):
            self.add([(index, offset + begin, min(cut, length - begin))])
        return start

    def extents(self) -> Iterator[Extent]:
        """Every extent with its pieces."""
        for index in range(len(self)):
            yield extent_of(
                Piece(
                    self.objects[self._piece_object[at]],
                    self._piece_offset[at],
                    self._piece_length[at],
                    CODECS[self._piece_codec[at]],
                )
                for at in range(self._extent_piece[index], self._extent_piece[index + 1])
            )

    def columns(self) -> dict[str, Array]:
        """What `Catalog` reads; ids and stored sizes follow from the pieces."""
        ids, stored = bytearray(), array("q")
        for extent in self.extents():
            ids += extent.id
            stored.append(extent.stored_bytes)
        return {
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
