"""Fills a descriptor with an extent's bytes, by many concurrent ranged reads."""

from __future__ import annotations

import mmap
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from cachesvc.core import holes
from cachesvc.core.errors import (
    CacheError,
    CorruptData,
    InvalidInput,
    SourceUnavailable,
)
from cachesvc.core.holes import Hole
from cachesvc.core.model import Extent, ObjectVersion, Piece
from cachesvc.sources import arrow_codecs, decompression
from cachesvc.sources.decompression import decompressed
from cachesvc.sources.framed_zstd import CODEC as FRAMED_ZSTD
from cachesvc.sources.framed_zstd import unpacked_chunk
from cachesvc.sources.parquet import decoding
from cachesvc.sources.parquet.recipe import CODEC as PARQUET
from cachesvc.sources.read_watch import ReadWatch
from cachesvc.sources.source import Checker, Source
from cachesvc.sources.stated_hashes import hash_checker
from cachesvc.system.buffers import Buffers
from cachesvc.system.fill_target import FillTarget, OnBytes, RangeWriter, ignore_bytes, open_target

PART_BYTES = 8 << 20
"""The size of a ranged read. At 20 ms a request and 90 MB/s a connection, latency is 18 % of the time of 8 MiB."""
THREADS = 64
"""Latency limits reads of small objects: 64 at a time give 3,000 objects a second at 20 ms."""
BUFFERS_IDLE_S = 1.0
"""Buffers are released this long after a fetch, unless another is under way then. The kernel clears new ones, which took
a sixth of the CPU time of fills when each fetch released them."""
BUFFERS_BYTES = 128 << 20
"""The limit of all buffers of a process; fewer threads run when ranges are large."""
_CHUNK_BYTES = 1 << 20
_NORESERVE = 0x4000
"""Linux's MAP_NORESERVE, which Python names from 3.13 on. An object may be larger than this machine's memory."""
_MOST_STORED_BYTES = 1 << 32
"""The longest stored piece of Parquet that is held to be decoded; it may include columns that are not read."""
_SLACK_BYTES = 64 << 10
"""A compressed piece may be stored in twice its decoded size and this."""
_MAX_FAILED_FIRST = 32
"""Objects of an extent that may fail before one was read. More of them show that the source fails, not the objects."""
CODECS = (*decompression.CODECS, *arrow_codecs.CODECS, FRAMED_ZSTD, PARQUET)


@dataclass(frozen=True, slots=True)
class _RangeRead:
    """A range of one object to read: into the descriptor at `at`, or to its own offset in `whole.stored`."""

    version: ObjectVersion
    offset: int
    size: int
    at: int
    piece_index: int
    """The index of its piece in the extent."""
    whole: _WholePiece | None = None


@dataclass(slots=True)
class _WholePiece:
    """A piece that is decoded or compared with its checksum once all of it has been read.

    `at`: its offset in the extent. `stored`: memory of the object's size for the ranges of an encoded piece. `pending`: the
    ranges that are missing, and one more until the source has answered with `check` for a piece that it can compare.
    """

    piece: Piece
    at: int
    piece_index: int
    stored: memoryview | None
    decoding: decoding.Decoding | None = None
    parts: list[_RangeRead] = field(default_factory=list)
    pending: int = 0
    check: Checker | None = None

    def split(self, part_bytes: int) -> list[_RangeRead | _WholePiece]:
        """Return what to request: its ranges, preceded by itself when its checksum is to be requested."""
        for begin, end in self.piece.ranges if self.decoding is None else self.decoding.ranges:
            for start in range(begin, end, part_bytes):
                size = min(part_bytes, end - start)
                self.parts.append(
                    _RangeRead(self.piece.object, start, size, self.at + start, self.piece_index, self)
                )
        requests: list[_RangeRead | _WholePiece] = [*self.parts]
        if self.piece.hash:
            self.check = hash_checker(self.piece.object.uri, self.piece.hash)
        elif len(self.parts) > 1 and not self.piece.stored:
            requests.insert(0, self)
        self.pending = len(requests)
        return requests


class _MissingPieces:
    """The pieces that an extent of several objects is filled without. Thread-safe."""

    def __init__(self, extent: Extent) -> None:
        uris = {piece.object.uri for piece in extent.pieces}
        self._may_miss = len(uris) == len(extent.pieces) > 1 and not any(
            piece.codec for piece in extent.pieces
        )
        self.errors: dict[int, CacheError] = {}
        self.any_read = False
        """Whether any range of the extent was read."""
        self._lock = threading.Lock()

    def add(self, piece_index: int, error: CacheError) -> bool:
        """Note a piece that cannot be read. Return False when the fill must fail instead: the piece is not an object of its
        own, or so many are missing that the source must be at fault."""
        with self._lock:
            self.errors.setdefault(piece_index, error)
            few = self.any_read or len(self.errors) < _MAX_FAILED_FIRST
            return self._may_miss and few and len(encode_missing(self.errors)) <= holes.MAX_TEXT_CHARS


def encode_missing(missing: Mapping[int, CacheError]) -> str:
    """Encode the result of `fetch` as grants carry it."""
    return holes.encode(Hole(piece_index, error.code) for piece_index, error in missing.items())


class Fetcher:
    """Runs fetches in one pool of threads. Buffers are shared, and released soon after the last fetch.

    `source_of` returns the source of a URI and is called from many threads.
    """

    def __init__(
        self, source_of: Callable[[str], Source], threads: int = THREADS, part_bytes: int = PART_BYTES
    ) -> None:
        self._source_of = source_of
        self._threads = threads
        self._part_bytes = part_bytes
        self._pool = ThreadPoolExecutor(threads, "fetch")
        self._buffers = Buffers(BUFFERS_BYTES)
        self._lock = threading.Lock()
        self._under_way = 0
        self._releasing = False
        """Whether a timer runs that releases the buffers."""

    def fetch(
        self,
        extent: Extent,
        into_fd: int,
        passing: OnBytes = ignore_bytes,
        watch: ReadWatch | None = None,
    ) -> dict[int, CacheError]:
        """Write the extent's `size_bytes` at offset 0 of `into_fd`; returns when no thread writes any more.
        `passing(at, data)` is called from many threads once `data` is in place, while the processor's cache holds it.
        `watch` may have the reads given up.

        Returns the pieces that are missing, by index, and why: objects of an extent of several that have a permanent error
        while others can be read. The bytes in their place are undefined.

        Raises the first error of the source and gives up the rest, CorruptData when an encoded object does not decode to
        exactly its announced length, OutOfSpace, TierFailed.
        """
        with self._lock:
            self._under_way += 1
        try:
            missing = _MissingPieces(extent)
            parts = deque(_parts(extent, self._part_bytes, self._source_of))
            with open_target(into_fd, extent.size_bytes, self._buffers, passing) as into:
                self._drain_all(parts, into, missing, watch or ReadWatch())
            if missing.errors:
                self._check_source(extent, missing.errors)
            return missing.errors
        finally:
            with self._lock:
                self._under_way -= 1
                if not self._under_way and not self._releasing:
                    self._release_later()

    def _release_later(self) -> None:
        timer = threading.Timer(BUFFERS_IDLE_S, self._release)
        timer.daemon = True
        try:
            timer.start()
            self._releasing = True
        except RuntimeError:  # no thread can be started
            self._buffers.release()

    def _release(self) -> None:
        """Release the buffers, unless a fetch is under way, the end of which starts another timer."""
        with self._lock:
            self._releasing = False
            if not self._under_way:
                self._buffers.release()

    def _drain_all(
        self,
        parts: deque[_RangeRead | _WholePiece],
        into: FillTarget,
        missing: _MissingPieces,
        watch: ReadWatch,
    ) -> None:
        if not parts:
            return
        wholes = [part.whole for part in parts if isinstance(part, _RangeRead) and part.whole is not None]
        largest = max(part.size for part in parts if isinstance(part, _RangeRead))
        count = min(self._threads, len(parts), max(1, BUFFERS_BYTES // largest))
        runs: list[Future[None]] = [Future() for _ in range(count)]
        try:
            for run in runs:
                self._pool.submit(self._drain, parts, into, missing, watch, run)
        except RuntimeError:  # no thread can be started: this one joins those that run
            here: Future[None] = Future()
            self._drain(parts, into, missing, watch, here)
            runs = [run for run in (*runs, here) if not run.cancel()]
        failures = [error for run in runs if (error := run.exception()) is not None]
        for whole in wholes:  # break the reference cycle with their parts, which holds memory
            whole.stored = None
            whole.parts.clear()
        if failures:
            raise failures[0]

    def _check_source(self, extent: Extent, missing: dict[int, CacheError]) -> None:
        """Raise when the source fails rather than the missing objects: after a mount was lost or credentials have expired,
        an object that was read before cannot be read either."""
        read = (
            piece
            for piece_index, piece in enumerate(extent.pieces)
            if piece.length and piece_index not in missing
        )
        piece = next(read, None)
        if piece is None:
            raise next(iter(missing.values()))
        self._source_of(piece.object.uri).read_into(piece.object, piece.offset, memoryview(bytearray(1)))

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()

    def _drain(
        self,
        parts: deque[_RangeRead | _WholePiece],
        into: FillTarget,
        missing: _MissingPieces,
        watch: ReadWatch,
        run: Future[None],
    ) -> None:
        """Execute parts until none is left, then finish `run`. Do nothing after `run` was cancelled: `into`'s descriptor
        may have been reused."""
        if not run.set_running_or_notify_cancel():
            return
        try:
            while True:
                try:
                    part = parts.popleft()
                except IndexError:
                    break
                if part.piece_index not in missing.errors:
                    with watch.reading():  # the end of each part counts as progress
                        self._run_one(part, into, missing, watch)
        except BaseException as error:  # noqa: BLE001
            parts.clear()  # the other threads stop after their current part
            run.set_exception(error)
        else:
            run.set_result(None)

    def _run_one(
        self, part: _RangeRead | _WholePiece, into: FillTarget, missing: _MissingPieces, watch: ReadWatch
    ) -> None:
        try:
            self._execute(part, into, watch)
        except holes.PERMANENT as error:
            if not missing.add(part.piece_index, error):
                raise
        else:
            if isinstance(part, _RangeRead):
                missing.any_read = True

    def _execute(self, part: _RangeRead | _WholePiece, into: FillTarget, watch: ReadWatch) -> None:
        if isinstance(part, _WholePiece):
            version, whole = part.piece.object, part
            part.check = self._source_of(version.uri).checker(version)
        else:
            self._read(part, into, watch)
            if part.whole is None:
                return
            whole = part.whole
        with self._lock:
            whole.pending -= 1
            complete = not whole.pending
        if complete:
            self._complete(whole, into, watch)

    def _read(self, part: _RangeRead, into: FillTarget, watch: ReadWatch) -> None:
        source = self._source_of(part.version.uri)
        if part.whole is not None and part.whole.stored is not None:
            stored = part.whole.stored[part.offset :][: part.size]
            source.read_into(part.version, part.offset, stored, lambda _: watch.moved())
            return
        with into.room(part.at, part.size) as view:
            passing = RangeWriter(into, part.at, view)

            def received(count: int) -> None:
                watch.moved()
                passing.received(count)

            source.read_into(part.version, part.offset, view, received)
            passing.finish()

    def _complete(self, whole: _WholePiece, into: FillTarget, watch: ReadWatch) -> None:
        """Compare, decode and write a piece that has been read. Read it once more when it differs from its checksum."""
        if whole.check is not None:
            try:
                whole.check(self._bytes(whole, into))
            except SourceUnavailable:
                for part in whole.parts:
                    self._read(part, into, watch)
                whole.check(self._bytes(whole, into))
        if whole.stored is not None and whole.decoding is not None:
            into.write(whole.decoding.decode(whole.stored).data, whole.at)
        elif whole.stored is not None:
            begin, end = whole.piece.ranges[0]
            _decode(whole.piece, whole.stored[begin:end], whole.at, into)
        whole.stored = None

    def _bytes(self, whole: _WholePiece, into: FillTarget) -> Iterator[memoryview]:
        """Yield the stored bytes of a piece in order."""
        if whole.stored is not None:
            yield whole.stored
            return
        with self._buffers.borrowed(_CHUNK_BYTES) as buffer:
            for start in range(0, whole.piece.length, _CHUNK_BYTES):
                view = buffer[: whole.piece.length - start]
                into.read(view, whole.at + start)
                yield view


def _parts(
    extent: Extent, part_bytes: int, source_of: Callable[[str], Source]
) -> Iterator[_RangeRead | _WholePiece]:
    at = 0
    for piece_index, piece in enumerate(extent.pieces):
        version = piece.object
        if piece.codec:
            if piece.codec.split(":")[0] not in CODECS:
                raise InvalidInput(
                    f"{version.uri}: codec {piece.codec!r} is unknown; {' and '.join(CODECS)} are read"
                )
            if piece.length and not version.size_bytes:
                raise CorruptData(f"{version.uri} is empty, not {piece.codec}")
            _check_stored(piece)
            how = decoding.prepare(piece, source_of(version.uri)) if piece.tail else None
            whole = _WholePiece(piece, at, piece_index, _sparse(version.size_bytes), how)
            yield from whole.split(part_bytes)
        elif (
            piece.offset == 0
            and piece.length == version.size_bytes
            and (piece.hash or piece.length > part_bytes)
        ):
            yield from _WholePiece(piece, at, piece_index, None).split(part_bytes)
        else:
            for start in range(0, piece.length, part_bytes):
                size = min(part_bytes, piece.length - start)
                yield _RangeRead(version, piece.offset + start, size, at + start, piece_index)
        at += piece.length


def _check_stored(piece: Piece) -> None:
    """Raise CorruptData for an encoded piece that is stored in far more bytes than it decodes to: it is held in memory."""
    most = _MOST_STORED_BYTES if piece.tail else 2 * piece.length + _SLACK_BYTES
    if piece.stored_bytes > most:
        raise CorruptData(
            f"{piece.object.uri} takes {piece.stored_bytes:,} bytes as {piece.codec} for {piece.length:,} bytes of data; "
            f"{most:,} at most are read"
        )


def _sparse(size: int) -> memoryview:
    """Map memory that takes up only the pages written to."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    return memoryview(mmap.mmap(-1, max(1, size), flags))[:size]


def _decode(piece: Piece, stored: memoryview, at: int, into: FillTarget) -> None:
    """Decompress an object and write it. Raises CorruptData at the first byte beyond the announced length."""
    uri, expected, done = piece.object.uri, piece.length, 0
    if piece.codec in arrow_codecs.CODECS:
        into.write(arrow_codecs.unpacked(uri, piece.codec, stored, expected), at)
        return
    framed = piece.codec == FRAMED_ZSTD
    steps = (
        unpacked_chunk(uri, stored) if framed else decompressed(uri, piece.codec.partition(":")[0], [stored])
    )
    for step in steps:
        if done + len(step) > expected:
            raise CorruptData(f"{uri} decodes to more than the {expected} bytes that its index says")
        into.write(memoryview(step), at + done)
        done += len(step)
    if done != expected:
        raise CorruptData(f"{uri} decodes to {done} bytes, not the {expected} that its index says")
