"""Connections of clients: how many there may be, and how large their requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

log = logging.getLogger(__name__)
IDLE_S = 60.0
"""A connection without a whole request for so long is closed."""
LINE_BYTES, FIELD_BYTES = 16 << 10, 16 << 10
"""The longest request line, with a presigned query, and the longest header."""
END_S = 2.0
"""The time that answers under way get when the endpoint ends."""


class Connections:
    """Makes the protocol of each connection; the most that there may be are `most`, and others are closed at once."""

    def __init__(self, handle: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]], most: int) -> None:
        self._most = most
        self._server = web.Server(
            handle,
            access_log=None,
            keepalive_timeout=IDLE_S,
            max_line_size=LINE_BYTES,
            max_field_size=FIELD_BYTES,
            lingering_time=0.0,
            auto_decompress=False,
        )
        self._full = False

    def __call__(self) -> asyncio.Protocol:
        """Return the protocol of a new connection."""
        full = len(self._server.connections) >= self._most
        if full and not self._full:
            log.warning("too many connections to the S3 endpoint", extra={"most": self._most})
        self._full = full
        return _Closed() if full else self._server()

    @property
    def open(self) -> list[RequestHandler]:
        """The connections."""
        return list(self._server.connections)

    async def close(self) -> None:
        """End all connections."""
        await self._server.shutdown(END_S)


class _Closed(asyncio.Protocol):
    """A connection that is one too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Close it."""
        transport.close()
