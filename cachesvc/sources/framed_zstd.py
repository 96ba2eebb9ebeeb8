"""Decodes litData's chunks of zstd frames, as `optimize(compression="zstd")` writes them, to the form of its plain chunks.

A stored chunk has a head (magic, u16 version, u16 flags, u32 items, u32 items in a frame, u32 frames), u32
offsets[items + 1] from the first item on, an entry for each frame (u32 first item, u32 items, u64 offset in the chunk, u32
stored size, u32 decoded size), and the frames. A plain chunk is u32 items, u32 offsets[items + 1] in the chunk, and items.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np
import zstandard

from cachesvc.core.errors import CorruptData

CODEC = "litdata-zstd"
MAGIC = b"LDFZ01\0\0"
HEAD = struct.Struct("<8sHHIII")
_VERSION = 1
_FRAME = np.dtype([("first", "<u4"), ("items", "<u4"), ("offset", "<u8"), ("stored", "<u4"), ("size", "<u4")])
_STEP_BYTES = 1 << 20


def items_of(uri: str, head: bytes) -> int:
    """Return the number of items by a chunk's head. Raises CorruptData for another one."""
    if len(head) < HEAD.size or not head.startswith(MAGIC):
        raise CorruptData(
            f"{uri} is no litData chunk of zstd frames, which its index.json says: write it anew"
        )
    _, version, _, items, _, frames = HEAD.unpack_from(head)
    if version != _VERSION or not 0 < frames <= items:
        raise CorruptData(f"{uri} has a head of version {version} with {frames} frames of {items} items")
    return int(items)


def unpacked_chunk(uri: str, stored: memoryview) -> Iterator[bytes]:
    """Yield the bytes of the plain chunk. Raises CorruptData for a damaged one."""
    items = items_of(uri, bytes(stored[: HEAD.size]))
    frames = HEAD.unpack_from(stored)[5]
    table = HEAD.size + 4 * (items + 1)
    if table + _FRAME.itemsize * frames > len(stored):
        raise CorruptData(f"{uri} is truncated in the table of its frames: write it anew")
    offsets = np.frombuffer(stored, "<u4", items + 1, HEAD.size).astype(np.int64) + 4 * (items + 2)
    if offsets[-1] >> 32:
        raise CorruptData(f"{uri} has items beyond 4 GiB, which no offset in a chunk reaches")
    yield struct.pack("<I", items) + offsets.astype("<u4").tobytes()
    for frame in np.frombuffer(stored, _FRAME, frames, table).tolist():
        _, _, offset, length, size = frame
        if offset + length > len(stored):
            raise CorruptData(f"{uri} is truncated in a frame at byte {offset:,}: write it anew")
        yield from unframed(uri, stored[offset : offset + length], size)


def unframed(uri: str, frame: bytes | memoryview, limit: int) -> Iterator[bytes]:
    """Yield the decoded bytes of one frame, at most `limit` of them, in steps. Raises CorruptData."""
    left = limit
    try:
        with zstandard.ZstdDecompressor().stream_reader(frame) as reader:
            while part := reader.read(min(left, _STEP_BYTES) + 1):
                left -= len(part)
                if left < 0:
                    raise CorruptData(
                        f"{uri} has a zstd frame of more than the {limit:,} bytes that it may have"
                    )
                yield part
    except zstandard.ZstdError as error:
        raise CorruptData(f"{uri} is no valid zstd: {error}; write it anew") from error
