"""Decodes what was fetched of a piece: row groups, by the footer of their file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cachesvc.core.errors import CorruptData
from cachesvc.core.model import Piece
from cachesvc.sources.columnar.extent import Values
from cachesvc.sources.parquet.footers import FOOTERS
from cachesvc.sources.parquet.parquet import FOOTER_BYTES, Ranges, decoding
from cachesvc.sources.parquet.recipe import recipe_of
from cachesvc.sources.source import Source


@dataclass(frozen=True, slots=True)
class Decoding:
    """`ranges` of the object are needed, and `decode` makes the piece of memory of the object's size that holds them."""

    ranges: Ranges
    decode: Callable[[memoryview], Values]


def prepare(piece: Piece, source: Source) -> Decoding:
    """Find out what a piece of row groups needs. Reads the footer, unless this process knows it. Raises CorruptData, and
    the errors of the source."""
    version = piece.object
    if piece.tail > FOOTER_BYTES:
        raise CorruptData(f"{version.uri} has a footer of {piece.tail:,} bytes: build the catalog again")

    def read(begin: int, end: int) -> bytes:
        buffer = bytearray(end - begin)
        source.read_into(version, begin, memoryview(buffer))
        return bytes(buffer)

    size = version.size_bytes
    footer = FOOTERS.of(version, lambda: read(size - piece.tail, size))
    run, recipe = decoding(piece, footer, read), recipe_of(piece.codec)
    return Decoding(run.ranges, lambda stored: footer.decode(run, recipe, stored))
