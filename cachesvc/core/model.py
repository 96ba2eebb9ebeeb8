"""The nouns of the system: object versions, pieces, extents."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NewType, TypeAlias

ExtentId = NewType("ExtentId", bytes)
"""128-bit digest of an extent's pieces: changed data has another id."""

PREPARED_MARK = b"prep"
"""The end of the ids of prepared extents. So a node knows them where it has not opened their dataset."""

SourceExtent: TypeAlias = tuple[ExtentId, int]
"""The extent from whose samples a prepared extent is made, and its size in bytes."""

DatasetId = NewType("DatasetId", str)
"""Hex digest of a catalog: one immutable version of a dataset."""

ReaderId = NewType("ReaderId", int)
"""One connection of a reader to the grants socket."""

TierName = NewType("TierName", str)
"""`ram`, or the name of an NVMe directory (`nvme0`, `nvme1`, ...)."""

Stay = Literal["kept", "brief", "once"]
"""The lifetime of a lease: as long as the reader likes, until a later read does not need the extent, or for one read. The
words go over the wire."""
Counted = Literal["hits", "ahead", "misses"]
"""How a granted demand is counted; see `core/node/status.py`."""

RAM = TierName("ram")
EXTENT_BYTES = 64 << 20
"""64 MiB: long enough to amortise a request (20 ms at 90 MB/s is 1.8 MB), short enough for a window."""
PART_BYTES = 4 << 20
"""How objects are cut that no dataset declares, unless settings say otherwise: a range costs at most the parts that it
touches, and one of 4 MiB takes as long as two round trips."""
MAX_EXTENTS = 1_000_000
"""Limit of a dataset version, and so of a plan: 64 TB. A daemon holds 330 bytes for each extent."""
PAGE_BYTES = 4096
HUGE_BYTES = 2 << 20
DEFAULT_WINDOW_BYTES = 256 << 20
"""What a loader shuffles together unless told otherwise: four extents of 64 MiB mix well, and the first batch waits for no
more than this."""
"""A huge page: bytes that begin at a multiple of it in the address space and in memory can be mapped as one."""


def is_prepared(extent: ExtentId) -> bool:
    """Return whether an extent holds prepared samples, which are one user's."""
    return extent.endswith(PREPARED_MARK)


@dataclass(frozen=True, slots=True)
class ObjectVersion:
    """A stored object as it was listed: bytes that never change.

    `etag` is the store's entity tag; on POSIX `"{mtime_ns}-{ctime_ns}"`. It is empty where the source offers neither, and
    then the object is unversioned.
    """

    uri: str
    size_bytes: int
    etag: str


@dataclass(frozen=True, slots=True)
class Piece:
    """A byte range of one object, `length` bytes from `offset` on, in an extent.

    With a `codec`, a fill decodes them from the `stored` bytes at `offset`, or, where `stored` is 0, from the whole object.
    With a `tail`, these bytes lie somewhere from `offset` on, where the last `tail` bytes of the object say.
    `hash`: of a piece that is a whole object, the hash of its stored bytes that the dataset's index states, as
    `algorithm:hex digits`.
    """

    object: ObjectVersion
    offset: int
    length: int
    codec: str = ""
    stored: int = 0
    tail: int = 0
    hash: str = ""

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """The byte ranges of the object that are fetched for this piece, each [begin, end). Only the object's tail knows
        those of a piece with a tail."""
        size = self.object.size_bytes
        if not self.codec:
            return ((self.offset, self.offset + self.length),)
        if not self.stored:
            return ((0, size),)
        return ((self.offset, self.offset + self.stored),)

    @property
    def stored_bytes(self) -> int:
        """Bytes that cross the network when this piece is fetched."""
        return sum(end - begin for begin, end in self.ranges)


@dataclass(frozen=True, slots=True)
class Extent:
    """The unit of caching: the concatenation of its pieces."""

    id: ExtentId
    pieces: tuple[Piece, ...]
    size_bytes: int
    stored_bytes: int


def extent_of(pieces: Iterable[Piece]) -> Extent:
    """The extent of a run of pieces. Its id is blake2b-128 over every field of every piece, length-prefixed."""
    run = tuple(pieces)
    digest = hashlib.blake2b(digest_size=16)
    for piece in run:
        for text in (piece.object.uri, piece.object.etag, piece.codec):
            raw = text.encode("utf-8", "surrogateescape")
            digest.update(struct.pack("<I", len(raw)) + raw)
        digest.update(struct.pack("<QQQ", piece.object.size_bytes, piece.offset, piece.length))
        if piece.stored:
            digest.update(struct.pack("<QQ", piece.stored, piece.tail))
        if piece.hash:
            digest.update(f"hash {piece.hash}\n".encode("utf-8", "surrogateescape"))
    return Extent(
        ExtentId(digest.digest()), run, sum(p.length for p in run), sum(p.stored_bytes for p in run)
    )
