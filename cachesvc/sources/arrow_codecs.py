"""Decompresses pieces of LZ4, Brotli and Snappy by pyarrow, whose decoders are given room for the expected bytes alone."""

from __future__ import annotations

from typing import Any

from cachesvc.core.errors import CorruptData
from cachesvc.sources.parquet.recipe import pyarrow_for

CODECS = ("lz4", "brotli", "snappy")
"""Frames of LZ4, Brotli streams, and blocks of Snappy without framing."""


def unpacked(uri: str, codec: str, packed: memoryview, size: int) -> memoryview:
    """Decode one object, or a part of one, to exactly `size` bytes.

    Raises CorruptData for other bytes, InvalidInput where pyarrow is not installed.
    """
    arrow = pyarrow_for(uri, f"compressed as {codec}")
    try:
        found = _snappy(arrow, packed, size) if codec == "snappy" else _stream(arrow, codec, packed, size)
    except (arrow.ArrowException, OSError, ValueError) as error:
        raise CorruptData(f"{uri} is not valid {codec}: {error}; write it anew") from error
    if found.size != size:
        what = f"more than the {size}" if found.size > size else f"{found.size} bytes, not the {size}"
        raise CorruptData(f"{uri} decodes to {what} that its index says")
    return memoryview(found)


def _stream(arrow: Any, codec: str, packed: memoryview, size: int) -> Any:
    """Decode `size` + 1 bytes at most: `decompress` does not tell how many bytes it wrote."""
    with arrow.CompressedInputStream(arrow.BufferReader(arrow.py_buffer(packed)), codec) as stream:
        return stream.read_buffer(size + 1)


def _snappy(arrow: Any, packed: memoryview, size: int) -> Any:
    """Decode a block, which begins with its decoded size: seven bits in each byte, the lowest first.
    https://github.com/google/snappy/blob/main/format_description.txt"""
    stated = 0
    for at, byte in enumerate(packed[:5]):
        stated |= (byte & 0x7F) << 7 * at
        if byte < 0x80:
            break
    if stated != size:
        raise ValueError(f"it states {stated} bytes, its index {size}")
    return arrow.decompress(arrow.py_buffer(packed), size, "snappy")
