"""Clients that ask too much, too slowly or nothing whole: they are refused or cut off, and others are served."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

import cachesvc.gateway.s3.__main__ as connections
from cachesvc.gateway.s3.__main__ import Connections
from testbed import WAIT_S

MOST = 3
WHOLE = b"GET /b/k HTTP/1.1\r\nHost: h\r\n\r\n"


async def hello(_: web.BaseRequest) -> web.StreamResponse:
    return web.Response(body=b"hello")


@asynccontextmanager
async def listening() -> AsyncIterator[int]:
    """A port whose connections are bounded; its requests are all answered in the same way."""
    made = Connections(hello, MOST)
    server = await asyncio.get_running_loop().create_server(made, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await made.close()


async def answer(port: int, sent: bytes) -> bytes:
    """Everything that comes back until the other side closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    try:
        return await asyncio.wait_for(reader.read(), WAIT_S)
    finally:
        writer.close()


def run(work: Callable[[int], Awaitable[None]]) -> None:
    async def served() -> None:
        async with listening() as port:
            await work(port)

    asyncio.run(served())


def test_connections_beyond_the_limit_are_closed_and_others_served() -> None:
    async def work(port: int) -> None:
        kept = [await asyncio.open_connection("127.0.0.1", port) for _ in range(MOST)]
        for reader, writer in kept:  # they are accepted one after another
            writer.write(WHOLE)
            assert (await reader.readuntil(b"hello")).startswith(b"HTTP/1.1 200")
        assert await answer(port, b"") == b""
        kept[0][1].write(WHOLE)
        assert await kept[0][0].readuntil(b"hello")
        for _, writer in kept:
            writer.close()

    run(work)


def test_half_a_request_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "IDLE_S", 0.05)

    async def work(port: int) -> None:
        assert await answer(port, WHOLE[:20]) == b""

    run(work)


def test_long_headers_and_lines_are_refused() -> None:
    async def work(port: int) -> None:
        long = b"x" * (connections.FIELD_BYTES + 1)
        for sent in (b"GET /" + long + b" HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\na: " + long + b"\r\n\r\n"):
            assert (await answer(port, sent)).startswith((b"HTTP/1.0 400", b"HTTP/1.1 400"))

    run(work)
