"""Fill a descriptor with an extent's bytes: many ranged reads at once into reused buffers, then `pwrite`."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import zstandard

from cachesvc.core import holes
from cachesvc.core.errors import (
    CacheError,
    CorruptData,
    InvalidInput,
    OutOfSpace,
    SourceUnavailable,
    TierFailed,
)
from cachesvc.core.holes import Hole
from cachesvc.core.model import Extent, ObjectVersion, Piece
from cachesvc.sources.buffers import Buffers
from cachesvc.sources.parquet import parquet
from cachesvc.sources.source import Checker, Source

PART_BYTES = 8 << 20
"""At 20 ms a request and 90 MB/s a connection a part of 8 MiB waits for 18 % of its time."""
THREADS = 64
"""Small objects wait for latency, not bandwidth: 64 under way hide 20 ms at 3,000 objects a second."""
BUFFERS_BYTES = 128 << 20
"""Memory that all buffers of a process may take; fewer threads run where parts are large."""
_CHUNK_BYTES = 1 << 20
_WINDOW_BYTES = 128 << 20
_NORESERVE = 0x4000
"""Linux's MAP_NORESERVE, which Python names from 3.13 on: an object may be larger than this machine's memory."""
_MOST_STORED_BYTES = 1 << 32
"""Of a piece of Parquet, which may hold columns that are left out: no more is held until it is decoded."""
_SLACK_BYTES = 64 << 10
"""What zstd may add: a piece of it takes twice what it unfolds to and this at most."""
_MOST_AT_FIRST = 32
"""Objects that may fail before any other of their extent was read: after that it is the source that is wrong."""
CODECS = ("zstd", "parquet")

OnBytes = Callable[[int, memoryview], None]


def _ignore_bytes(at: int, data: memoryview) -> None:
    """Nobody looks."""


@dataclass(frozen=True, slots=True)
class FillTarget:
    """Where an extent's bytes go: to `fd`, past whoever looks at them."""

    fd: int
    passing: OnBytes

    def write(self, data: memoryview, at: int) -> None:
        """All of `data`, from byte `at` on. Raises OutOfSpace, TierFailed."""
        self.passing(at, data)
        try:
            while len(data):
                done = os.pwrite(self.fd, data, at)
                data, at = data[done:], at + done
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise OutOfSpace("no space left for the extent; lower the budget") from error
            raise TierFailed(f"cannot write the extent being filled: {error.strerror}") from error

    def read(self, data: memoryview, at: int) -> None:
        """What was written from byte `at` on, to fill all of `data`. Raises TierFailed."""
        try:
            while len(data):
                done = os.preadv(self.fd, [data], at)
                if not done:
                    raise TierFailed("the extent being filled ends before what was written to it")
                data, at = data[done:], at + done
        except OSError as error:
            raise TierFailed(f"cannot read the extent being filled: {error.strerror}") from error


@dataclass(frozen=True, slots=True)
class _RangeRead:
    """A range of one object and where it goes: the descriptor at `at`, or its own piece_index in what is `whole.stored`."""

    version: ObjectVersion
    offset: int
    size: int
    at: int
    piece_index: int
    """The piece_index of its piece in the extent."""
    whole: _WholePiece | None = None


@dataclass(slots=True)
class _WholePiece:
    """A piece of which something remains to be done when all of it is there. It is fetched by `parts`, of which so many are
    `missing`, to `at`; an encoded one waits in `stored`, memory as large as its object, of which the parts are used.
    Where its bytes can be compared with what the source says of it, that is one more answer that is missing: `check`."""

    piece: Piece
    at: int
    piece_index: int
    stored: memoryview | None
    parts: list[_RangeRead] = field(default_factory=list)
    pending: int = 0
    check: Checker | None = None

    def split(self, part_bytes: int) -> list[_RangeRead | _WholePiece]:
        """What is to be asked of the source: itself, where it can be compared, and its parts."""
        for begin, end in self.piece.ranges:
            for start in range(begin, end, part_bytes):
                size = min(part_bytes, end - start)
                self.parts.append(
                    _RangeRead(self.piece.object, start, size, self.at + start, self.piece_index, self)
                )
        asked: list[_RangeRead | _WholePiece] = [*self.parts]
        if len(self.parts) > 1 and not self.piece.stored:
            asked.insert(0, self)
        self.pending = len(asked)
        return asked


class _MissingPieces:
    """The objects that an extent of several is filled without, for many threads."""

    def __init__(self, extent: Extent) -> None:
        uris = {piece.object.uri for piece in extent.pieces}
        self._apart = len(uris) == len(extent.pieces) > 1 and not any(piece.codec for piece in extent.pieces)
        self.errors: dict[int, CacheError] = {}
        self.some = False
        """Some of it was read."""
        self._lock = threading.Lock()

    def add(self, piece_index: int, error: CacheError) -> bool:
        """Note that a piece cannot be had; False where the extent is not to be filled without it: it is no object of its
        own, or so much is missing that more than these objects must be wrong."""
        with self._lock:
            self.errors.setdefault(piece_index, error)
            few = self.some or len(self.errors) < _MOST_AT_FIRST
            return self._apart and few and len(encode_missing(self.errors)) <= holes.MAX_TEXT_CHARS


def encode_missing(missing: Mapping[int, CacheError]) -> str:
    """The answer of `fetch` in the form that grants carry."""
    return holes.encode(Hole(piece_index, error.code) for piece_index, error in missing.items())


class Fetcher:
    """Threads, and buffers that are kept as long as any fetch is under way; all fetches share them.

    `source_of` answers the source for a URI and is called from many threads.
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

    def fetch(self, extent: Extent, into_fd: int, passing: OnBytes = _ignore_bytes) -> dict[int, CacheError]:
        """Write the extent's `size_bytes` at offset 0 of `into_fd`; returns when no thread writes any more.
        `passing(at, data)` sees what is written, from many threads, while it is in the processor's cache.

        Answers what is missing: the pieces of an extent of several objects that cannot be had for good while others can,
        and why. What lies in their piece_index is no data.

        Raises what the source raises (the first failure; the rest is given up), CorruptData when an encoded
        object does not decode to exactly its announced length, OutOfSpace, TierFailed.
        """
        with self._lock:
            self._under_way += 1
        try:
            missing = _MissingPieces(extent)
            self._drain_all(deque(_parts(extent, self._part_bytes)), FillTarget(into_fd, passing), missing)
            if missing.errors:
                self._check_source(extent, missing.errors)
            return missing.errors
        finally:
            with self._lock:
                self._under_way -= 1
                if not self._under_way:
                    self._buffers.release()

    def _drain_all(
        self, parts: deque[_RangeRead | _WholePiece], into: FillTarget, missing: _MissingPieces
    ) -> None:
        if not parts:
            return
        wholes = [part.whole for part in parts if isinstance(part, _RangeRead) and part.whole is not None]
        largest = max(part.size for part in parts if isinstance(part, _RangeRead))
        count = min(self._threads, len(parts), max(1, BUFFERS_BYTES // largest))
        runs: list[Future[None]] = [Future() for _ in range(count)]
        try:
            for run in runs:
                self._pool.submit(self._drain, parts, into, missing, run)
        except RuntimeError:  # no more threads can be started: this one joins those that there are
            here: Future[None] = Future()
            self._drain(parts, into, missing, here)
            runs = [run for run in (*runs, here) if not run.cancel()]
        failures = [error for run in runs if (error := run.exception()) is not None]
        for whole in wholes:  # they name their parts, and these them: no collection need find what they hold
            whole.stored = None
            whole.parts.clear()
        if failures:
            raise failures[0]

    def _check_source(self, extent: Extent, missing: dict[int, CacheError]) -> None:
        """Raise where it is not the missing objects that are wrong: after a mount has gone, or credentials have ended, one
        that was read cannot be read any more either."""
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
        run: Future[None],
    ) -> None:
        """Until no part is left; `run` is done then. Nothing, where it was cancelled: its descriptor may be another's."""
        if not run.set_running_or_notify_cancel():
            return
        try:
            while True:
                try:
                    part = parts.popleft()
                except IndexError:
                    break
                if part.piece_index not in missing.errors:
                    self._run_one(part, into, missing)
        except BaseException as error:  # noqa: BLE001
            parts.clear()  # the others stop after the part they hold
            run.set_exception(error)
        else:
            run.set_result(None)

    def _run_one(self, part: _RangeRead | _WholePiece, into: FillTarget, missing: _MissingPieces) -> None:
        try:
            self._execute(part, into)
        except holes.PERMANENT as error:
            if not missing.add(part.piece_index, error):
                raise
        else:
            if isinstance(part, _RangeRead):
                missing.some = True

    def _execute(self, part: _RangeRead | _WholePiece, into: FillTarget) -> None:
        if isinstance(part, _WholePiece):
            version, whole = part.piece.object, part
            part.check = self._source_of(version.uri).checker(version)
        else:
            self._read(part, into)
            if part.whole is None:
                return
            whole = part.whole
        with self._lock:
            whole.pending -= 1
            complete = not whole.pending
        if complete:
            self._complete(whole, into)

    def _read(self, part: _RangeRead, into: FillTarget) -> None:
        source = self._source_of(part.version.uri)
        if part.whole is not None and part.whole.stored is not None:
            source.read_into(part.version, part.offset, part.whole.stored[part.offset :][: part.size])
            return
        with self._buffers.borrowed(part.size) as view:
            source.read_into(part.version, part.offset, view)
            into.write(view, part.at)

    def _complete(self, whole: _WholePiece, into: FillTarget) -> None:
        """All of an object is here. Where that is not what the source says of it, it is read once more."""
        if whole.check is not None:
            try:
                whole.check(self._bytes(whole, into))
            except SourceUnavailable:
                for part in whole.parts:
                    self._read(part, into)
                whole.check(self._bytes(whole, into))
        if whole.stored is not None and whole.piece.codec == "parquet":
            into.write(parquet.decode(whole.piece, whole.stored).data, whole.at)
        elif whole.stored is not None:
            with self._buffers.borrowed(_CHUNK_BYTES) as buffer:
                _decode(whole.piece, whole.stored, whole.at, into, buffer)
        whole.stored = None

    def _bytes(self, whole: _WholePiece, into: FillTarget) -> Iterator[memoryview]:
        """Of an object as it is stored, in order."""
        if whole.stored is not None:
            yield whole.stored
            return
        with self._buffers.borrowed(_CHUNK_BYTES) as buffer:
            for start in range(0, whole.piece.length, _CHUNK_BYTES):
                view = buffer[: whole.piece.length - start]
                into.read(view, whole.at + start)
                yield view


def _parts(extent: Extent, part_bytes: int) -> Iterator[_RangeRead | _WholePiece]:
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
            yield from _WholePiece(piece, at, piece_index, _sparse(version.size_bytes)).split(part_bytes)
        elif piece.offset == 0 and part_bytes < piece.length == version.size_bytes:
            yield from _WholePiece(piece, at, piece_index, None).split(part_bytes)
        else:
            for start in range(0, piece.length, part_bytes):
                size = min(part_bytes, piece.length - start)
                yield _RangeRead(version, piece.offset + start, size, at + start, piece_index)
        at += piece.length


def _check_stored(piece: Piece) -> None:
    """Raises CorruptData for an encoded piece that takes more than it unfolds to: all of it is held in memory."""
    most = _MOST_STORED_BYTES if piece.codec == "parquet" else 2 * piece.length + _SLACK_BYTES
    if piece.stored_bytes > most:
        raise CorruptData(
            f"{piece.object.uri} takes {piece.stored_bytes:,} bytes as {piece.codec} for {piece.length:,} bytes of data; "
            f"{most:,} at most are read"
        )


def _sparse(size: int) -> memoryview:
    """Memory that costs what is written to it."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    return memoryview(mmap.mmap(-1, max(1, size), flags))[:size]


def _decode(piece: Piece, stored: memoryview, at: int, into: FillTarget, buffer: memoryview) -> None:
    """Decode by pieces of the buffer; a byte more than announced stops it, so no bomb unfolds."""
    uri, expected, done = piece.object.uri, piece.length, 0
    decoder = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES)
    try:
        with decoder.stream_reader(stored, read_across_frames=True) as reader:
            while got := reader.readinto(buffer):
                if done + got > expected:
                    raise CorruptData(f"{uri} decodes to more than the {expected} bytes that its index says")
                into.write(buffer[:got], at + done)
                done += got
    except zstandard.ZstdError as error:
        raise CorruptData(f"{uri} is not valid zstd: {error}") from error
    if done != expected:
        raise CorruptData(f"{uri} decodes to {done} bytes, not the {expected} that its index says")
