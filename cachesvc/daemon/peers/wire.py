"""Ids of extents in the messages of `Peers`: 16 bytes each, and 8 more for the generation of a fill."""

from __future__ import annotations

import struct
from collections.abc import Iterable

from cachesvc.core.errors import InvalidInput
from cachesvc.core.model import ExtentId

ID_BYTES = 16
_FILL = struct.Struct("<16sQ")


def unpack_ids(data: bytes) -> list[ExtentId]:
    """Return the ids of a message. Raises InvalidInput."""
    if len(data) % ID_BYTES:
        raise InvalidInput(f"{len(data):,} bytes are no list of extents")
    return [ExtentId(data[at : at + ID_BYTES]) for at in range(0, len(data), ID_BYTES)]


def pack_fills(fills: Iterable[tuple[ExtentId, int]]) -> bytes:
    """Return extents with their generations as bytes."""
    return b"".join(_FILL.pack(extent, generation) for extent, generation in fills)


def unpack_fills(data: bytes) -> list[tuple[ExtentId, int]]:
    """The inverse of `pack_fills`. Raises InvalidInput."""
    if len(data) % _FILL.size:
        raise InvalidInput(f"{len(data):,} bytes are no list of fills")
    return [(ExtentId(extent), generation) for extent, generation in _FILL.iter_unpack(data)]
