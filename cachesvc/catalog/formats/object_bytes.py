"""Reads whole objects in order, plain or compressed, and lays them out as extents.

Plain objects are read through the cache (`inputs.data`), cut at a fixed size. A compressed object can only be decoded
from its beginning, so it is one extent: it is fetched, kept and evicted as a whole, and a shuffled epoch fetches it
once. Its decoded size is known only after it was read, so the compiler reads it directly, and its first fill fetches it
again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from cachesvc.catalog.address_space import AddressSpace
from cachesvc.catalog.compiler import Inputs
from cachesvc.core.errors import CorruptData, InvalidInput
from cachesvc.core.model import ObjectVersion
from cachesvc.sources.decompression import codec_of, decompressed

MAX_DECODED_BYTES = 1 << 30
"""Limit of a compressed object, decoded: it is one extent, which a fill holds room for."""
_WINDOW_BYTES = 1 << 20
FETCH_BYTES = 8 << 20
_FETCHES = 8
"""Ranges of compressed objects that are fetched ahead: at most 64 MiB."""


class ObjectBytes:
    """The bytes of the objects of `inputs`, by index, which are read in order. Plain ones are declared at once."""

    def __init__(
        self,
        inputs: Inputs,
        chosen: Sequence[int] | None = None,
        fetch_bytes: int = FETCH_BYTES,
        most_bytes: int = MAX_DECODED_BYTES,
    ) -> None:
        """`chosen`: the objects that are read; None for all. Compressed ones are fetched in ranges of `fetch_bytes`. Raises
        InvalidInput for a compression that is not read."""
        self._fetch_bytes, self._most_bytes = fetch_bytes, most_bytes
        self._inputs = inputs
        self._versions = [entry.object for entry in inputs.entries]
        self.codecs = [codec_of(version.uri) for version in self._versions]
        self.cut = inputs.options.extent_bytes
        self._plain = AddressSpace(self._versions)
        self.first_extent: dict[int, int] = {}
        """The declared extent at which each plain object begins."""
        read = range(len(self._versions)) if chosen is None else chosen
        for at in read:
            if not self.codecs[at]:
                self.first_extent[at] = len(self._plain)
                self._plain.add_run(at, 0, self._versions[at].size_bytes, self.cut)
        packed = (self._versions[at] for at in read if self.codecs[at])
        self._to_fetch = ((version, *each) for version in packed for each in self._ranges(version))
        self._waiting: deque[tuple[tuple[ObjectVersion, int], Future[bytes]]] = deque()
        # Not in a generator: the garbage collector may close an abandoned one while this thread holds a lock that joining
        # threads takes. The threads end with the pool.
        self._pool = ThreadPoolExecutor(_FETCHES, "stored")
        self._decoding = ThreadPoolExecutor(1, "decoding")  # one window ahead of the parser
        if len(self._plain):
            inputs.data.declare(list(self._plain.extents()))

    def windows(self, at: int) -> Iterator[bytes]:
        """Yield the decoded bytes of an object in order. Raises CorruptData for a damaged one, InvalidInput for one that is
        too large to be decoded whole."""
        version = self._versions[at]
        if not self.codecs[at]:
            yield from self._plain_windows(at)
            return
        done, decoded = 0, _joined(decompressed(version.uri, self.codecs[at], self._stored(version)))
        coming = self._decoding.submit(next, decoded, b"")
        while window := coming.result():
            done += len(window)
            if done > self._most_bytes:
                raise InvalidInput(
                    f"{version.uri} decodes to more than {self._most_bytes >> 30} GiB, and {self.codecs[at]} cannot be "
                    "read from the middle: split it into smaller files, or decompress it"
                )
            coming = self._decoding.submit(next, decoded, b"")
            yield window
        if done * 2 + (64 << 10) < version.size_bytes:
            raise CorruptData(
                f"{version.uri} takes {version.size_bytes:,} bytes as {self.codecs[at]} for {done:,} bytes of data: write "
                "it anew"
            )

    def _plain_windows(self, at: int) -> Iterator[bytes]:
        size = self._versions[at].size_bytes
        for begin in range(0, size, self.cut):
            extent = self.first_extent[at] + begin // self.cut
            end = min(self.cut, size - begin)
            for offset in range(0, end, _WINDOW_BYTES):
                yield self._inputs.data.read(extent, offset, min(_WINDOW_BYTES, end - offset))

    def _stored(self, version: ObjectVersion) -> Iterator[bytes]:
        """Yield the stored bytes of an object. Ranges are fetched ahead, those of the objects behind it too."""
        for begin, _ in self._ranges(version):
            found = None
            while found != (version, begin):  # an object that failed leaves ranges behind
                while len(self._waiting) < _FETCHES and (wanted := next(self._to_fetch, None)):
                    self._waiting.append((wanted[:2], self._pool.submit(self._inputs.fetch, *wanted)))
                found, coming = self._waiting.popleft()
            yield coming.result()

    def _ranges(self, version: ObjectVersion) -> Iterator[tuple[int, int]]:
        """Yield the ranges, (offset, length), in which an object is fetched."""
        for begin in range(0, version.size_bytes, self._fetch_bytes):
            yield begin, min(self._fetch_bytes, version.size_bytes - begin)

    def add_to(self, space: AddressSpace, at: int, decoded_bytes: int) -> int:
        """Add the extents of an object that was read and return its start address."""
        if self.codecs[at]:
            return space.add([(at, 0, decoded_bytes)], self.codecs[at]) if decoded_bytes else space.end
        return space.add_run(at, 0, decoded_bytes, self.cut)


def _joined(steps: Iterator[bytes]) -> Iterator[bytes]:
    """Join steps to windows of `_WINDOW_BYTES` or more."""
    parts: list[bytes] = []
    held = 0
    for step in steps:
        parts.append(step)
        held += len(step)
        if held >= _WINDOW_BYTES:
            yield b"".join(parts)
            parts, held = [], 0
    if parts:
        yield b"".join(parts)
