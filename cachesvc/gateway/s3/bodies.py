"""Bodies of objects: parts that the daemon leases to this process, sent in order from their descriptors."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import chain, islice, pairwise
from typing import IO, cast

from aiohttp import web

from cachesvc.client.object_reads import LeasedPart, ObjectReads
from cachesvc.core.errors import DaemonUnavailable, OutOfSpace, TierFailed
from cachesvc.core.model import ObjectVersion
from cachesvc.gateway.s3.parts_ahead import AHEAD, AHEAD_OF_ALL, READ_S, PartsAhead
from cachesvc.gateway.s3.upstream import Upstream

log = logging.getLogger(__name__)
WRITE_BYTES = 256 << 10
"""Up to so many bytes, a copy costs less than `sendfile` and its events."""
STALL_S = 60.0
"""A client that takes a part of 4 MiB more slowly (70 KB/s) is disconnected, and its leases end."""
ROOM_S = 2.0
"""The wait for room in the daemon, before a part is read past the cache."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of an object that are sent together: `size_bytes` at offset `at` of a lease's descriptor, or in memory."""

    lease: LeasedPart | None
    at: int
    size_bytes: int
    memory: bytes = b""


class _OpenFile:
    """A descriptor, as asyncio's `sendfile` wants it."""

    mode = "rb"

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._fd


class Bodies:
    """Reads ranges of object versions. For one event loop."""

    def __init__(self, reads: ObjectReads, upstream: Upstream, part_bytes: int) -> None:
        self._reads, self._upstream, self._part_bytes = reads, upstream, part_bytes
        self._ahead = PartsAhead(reads, part_bytes)
        self._sent = 0
        """Bodies under way."""

    @asynccontextmanager
    async def pieces(
        self, version: ObjectVersion, begin: int, end: int
    ) -> AsyncIterator[AsyncIterator[Piece]]:
        """Give the pieces of a range, in order. The lease of a piece ends when the next one is asked for, and the last one
        with the block. Raises, for the first piece as for others, SourceChanged, NotAllowed and the errors of fills."""
        asked: deque[asyncio.Task[LeasedPart | None]] = deque()

        async def in_order() -> AsyncGenerator[Piece, None]:
            coming = self._starts(begin, end)
            for start, stop in pairwise(chain(self._starts(begin, end), (end,))):
                wanted = 1 + min(AHEAD, AHEAD_OF_ALL // self._sent)
                for ahead in islice(coming, max(0, wanted - len(asked))):
                    asked.append(asyncio.ensure_future(self._lease(version, ahead)))
                if start == begin:
                    self._ahead.read(version, begin, end)
                found, at = await asked[0], start
                asked.popleft()
                while at < stop:
                    found = found if at == start else await self._lease(version, at)
                    async with self._piece(version, found, at, stop) as piece:
                        yield piece
                    at += piece.size_bytes

        pieces = in_order()
        self._sent += 1
        try:
            yield pieces
        finally:
            self._sent -= 1
            await pieces.aclose()
            for task in asked:
                task.cancel()
            for left in await asyncio.gather(*asked, return_exceptions=True):
                if isinstance(left, LeasedPart):
                    self._reads.release(left)

    def begin(self, version: ObjectVersion, begin: int, end: int) -> None:
        """Have the daemon fetch the first parts of a range that will be wanted if the object has not changed."""
        for at in islice(self._starts(begin, end), 1 + AHEAD):
            self._ahead.lease(version, at)

    def _starts(self, begin: int, end: int) -> Iterator[int]:
        """Yield where the pieces of a range begin."""
        size = self._part_bytes
        return chain((begin,), range(begin // size * size + size, end, size))

    async def _lease(self, version: ObjectVersion, at: int) -> LeasedPart | None:
        """Lease the part that holds a byte; None where it is to be read past the cache."""
        try:
            ahead = self._ahead.take(version, at)
            found = await ahead if ahead is not None else None
            return found or await self._reads.lease(version, at, READ_S, ROOM_S)
        except (DaemonUnavailable, OutOfSpace, TierFailed) as error:
            log.warning("reading past the cache", extra={"error": str(error)})
            return None

    @asynccontextmanager
    async def _piece(
        self, version: ObjectVersion, found: LeasedPart | None, at: int, stop: int
    ) -> AsyncIterator[Piece]:
        if found is None:
            body = await self._upstream.read(version, at, stop)
            yield Piece(None, 0, len(body), body)
            return
        try:
            yield Piece(found, found.at + at - found.begin, min(found.end, stop) - at)
        finally:
            self._reads.release(found)


def in_memory(piece: Piece) -> bytes:
    """Return the bytes of a small piece. Raises TierFailed where the copy cannot be read."""
    if piece.lease is None:
        return piece.memory
    try:
        found = os.pread(piece.lease.fd, piece.size_bytes, piece.at)
    except OSError as error:
        raise TierFailed(f"a cached copy cannot be read: {error.strerror}") from error
    if len(found) < piece.size_bytes:
        raise TierFailed("a cached copy is too short")
    return found


async def send(response: web.StreamResponse, request: web.BaseRequest, piece: Piece) -> None:
    """Send a piece of a response whose head was sent. Raises ConnectionError where the client is gone or too slow, and
    TierFailed."""
    loop, transport = asyncio.get_running_loop(), request.transport
    if transport is None:
        raise ConnectionResetError("the client is gone")
    stalled = loop.call_later(STALL_S, transport.abort)
    try:
        if piece.lease is None or piece.size_bytes <= WRITE_BYTES or request.secure:
            for at in range(0, piece.size_bytes, WRITE_BYTES):
                await response.write(in_memory(_cut(piece, at)))
        else:
            file = cast("IO[bytes]", _OpenFile(piece.lease.fd))
            await loop.sendfile(transport, file, piece.at, piece.size_bytes)
    except OSError as error:
        raise ConnectionResetError(f"the client is gone, or the copy cannot be read: {error}") from error
    finally:
        stalled.cancel()


def _cut(piece: Piece, at: int) -> Piece:
    size_bytes = min(WRITE_BYTES, piece.size_bytes - at)
    return Piece(piece.lease, piece.at + at, size_bytes, piece.memory[at : at + size_bytes])
