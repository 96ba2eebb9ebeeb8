"""Decodes what was fetched of a piece: row groups, by the footer of their file. The footers of the files that this process
decoded from lately are kept: the next extent is often of the same file."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from cachesvc.core.errors import CorruptData
from cachesvc.core.model import ObjectVersion, Piece
from cachesvc.sources.columnar.extent import Values
from cachesvc.sources.parquet.parquet import FOOTER_BYTES, Footer, Ranges, decoding
from cachesvc.sources.parquet.recipe import recipe_of
from cachesvc.sources.source import Source

_MAX_FOOTERS = 64
_MAX_BYTES = FOOTER_BYTES
"""Limit of all footers together; a parsed one takes ten times its size."""


class Footers:
    """Footers by file, least recently used first. Thread-safe: a footer that several threads need is read once."""

    def __init__(self) -> None:
        self._found: OrderedDict[ObjectVersion, Future[Footer]] = OrderedDict()
        self._lock = threading.Lock()
        self._process = os.getpid()

    def of(self, version: ObjectVersion, load: Callable[[], bytes]) -> Footer:
        """Return a file's footer, parsed from what `load` returns unless it is known. Raises the errors of both."""
        if self._process != os.getpid():  # forked, perhaps while another thread held the lock
            self.__init__()  # type: ignore[misc]
        with self._lock:
            found = self._found.get(version)
            mine = found is None
            if found is None:
                found = self._found[version] = Future()
            self._found.move_to_end(version)
        if not mine:
            return found.result()
        try:
            footer = Footer(version.uri, load())
        except BaseException as error:
            with self._lock:
                self._found.pop(version, None)
            found.set_exception(error)
            raise
        found.set_result(footer)
        self._limit()
        return footer

    def forget(self) -> None:
        """Drop all footers."""
        with self._lock:
            self._found.clear()

    def _limit(self) -> None:
        with self._lock:
            done = [each for each, found in self._found.items() if found.done() and not found.exception()]
            size = sum(self._found[each].result().size_bytes for each in done)
            for each in done[:-1]:
                if len(self._found) <= _MAX_FOOTERS and size <= _MAX_BYTES:
                    return
                size -= self._found.pop(each).result().size_bytes


FOOTERS = Footers()
"""The footers of this process, for all its fetchers."""


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
