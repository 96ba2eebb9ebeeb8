"""Collects rows of text: finds the lines of objects, and drafts a catalog of where the rows of a dataset lie."""

from __future__ import annotations

from array import array
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

import numpy as np

from cachesvc.catalog.address_space import AddressSpace
from cachesvc.catalog.columns import ints
from cachesvc.catalog.compiler import Draft, Inputs, in_threads
from cachesvc.catalog.containers import HEAD_BYTES, by_content, compression_of
from cachesvc.catalog.content_sniffing import is_text
from cachesvc.catalog.formats.object_bytes import ObjectBytes
from cachesvc.catalog.labels.row_tags import RowTags
from cachesvc.catalog.layout import Field
from cachesvc.catalog.row_syntax import MAX_ROW_BYTES
from cachesvc.core.errors import CorruptData, InvalidInput, NotFound
from cachesvc.core.model import ObjectVersion
from cachesvc.sources.decompression import codec_of, decompressed

_BEGINNING_BYTES = 64 << 10


class TextRows:
    """The rows found so far. For each object: `lines`, `document` or `windows`, `add` for each row, `end_object`."""

    def __init__(self, inputs: Inputs, chosen: Sequence[int] | None = None) -> None:
        """`chosen`: the objects that are read; None for all."""
        self._inputs = inputs
        self._bytes = ObjectBytes(inputs, chosen)
        self._space = AddressSpace([entry.object for entry in inputs.entries])
        self._address, self._length = array("q"), array("q")
        self._runs, self._next_line = (array("q"), array("q")), 0
        self._headers = array("q")
        self._malformed, self._first_malformed = 0, ""
        self._begun_rows = self._begun_malformed = self._decoded = self._done = 0
        self._total = sum(entry.object.size_bytes for entry in inputs.entries)
        self.tags = RowTags()

    def __len__(self) -> int:
        return len(self._address)

    def lines(self, at: int) -> Iterator[tuple[int, bytes]]:
        """Begin an object: yield the offset of each line, and its bytes without line feed and byte order mark.

        Raises InvalidInput for an object of another format, CorruptData for a line beyond `MAX_ROW_BYTES`.
        """
        uri = self._inputs.entries[at].object.uri
        begin, windows = self._begin(at)
        parts: list[bytes] = []
        held = 0
        for window in windows:
            head, *lines = window.split(b"\n")
            parts.append(head)
            held += len(head)
            if held > MAX_ROW_BYTES:
                raise CorruptData(
                    f"{uri}: the line at byte {begin:,} is longer than {MAX_ROW_BYTES >> 20} MiB, and no row of text"
                )
            if lines:
                lines.insert(0, b"".join(parts))
                parts = [lines.pop()]
                held = len(parts[0])
            for line in lines:
                yield begin, line
                begin += len(line) + 1
        if last := b"".join(parts):
            yield begin, last

    def document(self, at: int) -> tuple[int, int]:
        """Begin an object and read it to its end: return the offset and the length of its text. Raises InvalidInput for an
        object of another format."""
        begin, windows = self._begin(at)
        return begin, sum(map(len, windows))

    def _begin(self, at: int) -> tuple[int, Iterator[bytes]]:
        """Begin an object. Return the size of its byte order mark, and the bytes behind it."""
        windows, version = self.windows(at), self._inputs.entries[at].object
        first = next(windows, b"")
        _check_text(version.uri, first, version.size_bytes)
        mark = len(BOM_UTF8) if first.startswith(BOM_UTF8) else 0
        return mark, chain([first[mark:]], windows)

    def windows(self, at: int) -> Iterator[bytes]:
        """Begin an object, and yield its decoded bytes."""
        self._begun_rows, self._begun_malformed, self._next_line = len(self), self._malformed, 0
        return self._windows(at)

    def _windows(self, at: int) -> Iterator[bytes]:
        """Yield the bytes of an object, counted."""
        self._decoded = 0
        for window in self._bytes.windows(at):
            self._decoded += len(window)
            read = min(self._decoded, self._inputs.entries[at].object.size_bytes)
            self._inputs.progress(self._done + read, self._total)
            yield window

    def add(self, offset: int, length: int, line: int) -> int:
        """Add a row of an object: its offset, its length, and its first line. Return its sample number."""
        sample = len(self._address)
        self._address.append(offset)
        self._length.append(length)
        if line != self._next_line:
            self._runs[0].append(sample)
            self._runs[1].append(line)
        self._next_line = line + 1
        return sample

    def add_malformed(self, at: int, line: int, why: object) -> None:
        """Note that the row added last does not parse. It is a sample, which raises this when it is read."""
        self._malformed += 1
        self._first_malformed = (
            self._first_malformed or f"{self._inputs.entries[at].object.uri} line {line}: {why}"
        )

    def end_object(self, at: int, header: int = 0) -> None:
        """Lay out the object. Raises CorruptData where none of its rows parses."""
        rows, malformed = len(self) - self._begun_rows, self._malformed - self._begun_malformed
        entry = self._inputs.entries[at]
        if rows and rows == malformed:
            why = self._first_malformed if malformed == self._malformed else entry.object.uri
            raise CorruptData(
                f"{why}; none of its {rows:,} lines is {self._inputs.options.format}: convert it, or leave it out"
            )
        before = len(self._space)
        start = self._bytes.add_to(self._space, at, self._decoded)
        if rows:
            np.frombuffer(self._address, np.int64)[self._begun_rows :] += start
        self._headers.extend([header] * (len(self._space) - before))
        self._done += entry.object.size_bytes
        self._inputs.progress(self._done, self._total)

    def draft(
        self, syntax: str, fields: Sequence[Field], headers: Sequence[tuple[str, Sequence[int]]] = ()
    ) -> Draft:
        """Return the draft. Raises NotFound where there is no row."""
        if not len(self):
            raise NotFound(
                f"{self._inputs.uri} holds no rows: its {self._inputs.options.format} files are empty"
            )
        addresses = ints(self._address)
        firsts = np.searchsorted(addresses, ints(self._space.starts)).astype(np.int64)
        head: dict[str, Any] = {"syntax": syntax, "headers": [[sep, list(cells)] for sep, cells in headers]}
        draft = Draft("rows", self._space, tuple(fields), np.append(firsts, np.int64(len(self))), head)
        draft.columns = {
            "row.address": addresses,
            "row.length": ints(self._length),
            "line.first": ints(self._runs[0]),
            "line.from": ints(self._runs[1]),
            "extent.header": ints(self._headers),
        }
        draft.tags = self.tags.columns(len(self))
        draft.notes = self.tags.notes()
        if self._malformed:
            draft.notes.append(
                f"{self._malformed:,} of {len(self):,} rows do not parse, the first is {self._first_malformed}; "
                "repair them, or leave them out by on_error='skip'"
            )
        return draft


def first_lines(inputs: Inputs, wanted: Sequence[int]) -> dict[int, list[bytes]]:
    """Return the whole lines among the first bytes of objects. Raises InvalidInput for a compression that is not read."""
    beginnings = in_threads(lambda at: _beginning(inputs, inputs.entries[at].object), wanted)
    return dict(zip(wanted, beginnings, strict=True))


def _beginning(inputs: Inputs, version: ObjectVersion) -> list[bytes]:
    stored = inputs.fetch(version, 0, min(version.size_bytes, _BEGINNING_BYTES))
    whole, codec = len(stored) == version.size_bytes, codec_of(version.uri)
    body = b"" if codec else stored
    if codec:
        with suppress(CorruptData):  # the stream does not end here
            for step in decompressed(version.uri, codec, [stored]):
                body += step
                if len(body) > _BEGINNING_BYTES:
                    whole = False
                    break
    return (body + b"\n" * whole).removeprefix(BOM_UTF8).split(b"\n")[:-1]


def _check_text(uri: str, beginning: bytes, size_bytes: int) -> None:
    """Raise InvalidInput for an object that begins as another format does."""
    head = beginning[:HEAD_BYTES]
    if head.startswith((BOM_UTF16_LE, BOM_UTF16_BE)):
        raise InvalidInput(f"{uri} is text in UTF-16: save it as UTF-8")
    container = None if is_text(head) else by_content(head, size_bytes)
    if kind := compression_of(head) or (container.name if container else ""):
        raise InvalidInput(f"{uri} is {kind}, not rows of text: give it the name of its format")
    if b"\0" in head:
        raise InvalidInput(f"{uri} is binary, not rows of text: leave it out, or convert it")
