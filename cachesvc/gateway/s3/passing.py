"""Passes requests on to the source as they came, signed with the node's credentials. Bodies stream, both ways."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import aiohttp
from aiohttp import web
from yarl import URL

from cachesvc.core.errors import SourceUnavailable
from cachesvc.core.limits import CONNECT_S
from cachesvc.gateway.s3.accounts import Accounts
from cachesvc.gateway.s3.aws_chunked import SignedChunks
from cachesvc.gateway.s3.bodies import STALL_S
from cachesvc.gateway.s3.errors import S3Error
from cachesvc.gateway.s3.parts_ahead import READ_S
from cachesvc.gateway.s3.requests import Asked
from cachesvc.sources.s3.signing import RequestSigner

UNSIGNED, UNSIGNED_CHUNKS = "UNSIGNED-PAYLOAD", "STREAMING-UNSIGNED-PAYLOAD-TRAILER"
_PASSED = frozenset(
    {
        "cache-control",
        "content-disposition",
        "content-encoding",
        "content-language",
        "content-length",
        "content-md5",
        "content-type",
        "expires",
        "if-match",
        "if-modified-since",
        "if-none-match",
        "if-unmodified-since",
        "range",
        "x-amz-checksum-algorithm",
        "x-amz-checksum-mode",
        "x-amz-checksum-type",
        "x-amz-decoded-content-length",
        "x-amz-expected-bucket-owner",
        "x-amz-metadata-directive",
        "x-amz-mp-object-size",
        "x-amz-sdk-checksum-algorithm",
        "x-amz-storage-class",
        "x-amz-tagging",
        "x-amz-tagging-directive",
        "x-amz-trailer",
    }
)
_PASSED_PARTS = ("x-amz-checksum-", "x-amz-copy-source", "x-amz-meta-")
_LEFT = frozenset(
    {
        "x-amz-api-version",
        "x-amz-content-sha256",
        "x-amz-date",
        "x-amz-security-token",
        "x-amz-request-payer",
        "x-amz-user-agent",
    }
)
"""Headers of the client's own signature, and those that change nothing."""
_HOP = frozenset({"connection", "content-length", "date", "keep-alive", "server", "transfer-encoding"})
_EXPIRED = (b"ExpiredToken", b"InvalidToken", b"TokenRefreshRequired")
MAX_ERROR_BYTES = 1 << 20


class Passing:
    """Sends requests to the source. For one event loop, on which it is made."""

    def __init__(self, accounts: Accounts) -> None:
        self._accounts, self._signing = accounts, ThreadPoolExecutor(4, "signing")
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=READ_S),
            auto_decompress=False,
            trust_env=True,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
        )

    async def close(self) -> None:
        """End all connections."""
        await self._session.close()

    async def passed(
        self,
        request: web.BaseRequest,
        ask: Asked,
        done: Callable[[], None],
        changed: Mapping[str, str],
        document: bytes | None = None,
    ) -> web.StreamResponse:
        """Send a request on, and its answer back. `done` is called before the client learns of the end, even where there is
        none. `changed`: other headers than the client's. `document`: a body in place of the client's.

        Raises S3Error, SourceUnavailable, NotAllowed, and ConnectionError where the client is gone."""
        headers = passed_headers(ask.headers) | dict(changed)
        body, payload = None, ask.payload
        if document is not None:
            headers["content-length"], payload = str(len(document)), hashlib.sha256(document).hexdigest()
        elif request.can_read_body:
            trailers = "x-amz-trailer" in ask.headers
            body = _Body(request, SignedChunks(ask.chunks, trailers) if ask.chunks is not None else None)
            payload = _without_signatures(headers, payload) if ask.chunks is not None else payload
        query = [(name, value) for name, value in ask.given.items() if not name.startswith("X-Amz-")]
        named = request.method, ask.bucket, ask.key, query, headers, payload

        def sign() -> tuple[RequestSigner, str, dict[str, str], Any]:
            signer = self._accounts.of(ask.uri).signer
            return signer, *signer.signed(*named)

        signer, url, signed, keys = await asyncio.get_running_loop().run_in_executor(self._signing, sign)
        if body is not None:
            await invite(request)
        data = document if body is None else body.pieces()
        try:
            async with self._session.request(
                request.method,
                URL(url, encoded=True),
                headers=signed,
                data=data,
                allow_redirects=False,
                ssl=signer.tls if signer.tls is not None else True,
            ) as answer:
                return await self._answered(request, answer, partial(signer.renew, keys), done)
        except (aiohttp.ClientError, asyncio.TimeoutError) as error:
            if body is not None and body.error is not None:
                raise body.error from error
            raise SourceUnavailable(f"{ask.uri}: the source did not answer ({error})") from error
        finally:
            done()

    async def _answered(
        self,
        request: web.BaseRequest,
        answer: aiohttp.ClientResponse,
        renew: Callable[[], bool],
        done: Callable[[], None],
    ) -> web.StreamResponse:
        """Send the source's answer to the client. Raises SourceUnavailable where the node's keys have expired,
        ConnectionError where either side is gone."""
        headers = {name: value for name, value in answer.headers.items() if name.lower() not in _HOP}
        if answer.status >= 400:
            refusal = await answer.content.read(MAX_ERROR_BYTES)
            if any(b"<Code>%s</Code>" % code in refusal for code in _EXPIRED):
                await asyncio.get_running_loop().run_in_executor(self._signing, renew)
                raise SourceUnavailable("the node's credentials have expired: try again")
            response: web.StreamResponse = web.Response(status=answer.status, headers=headers, body=refusal)
        else:
            response = web.StreamResponse(status=answer.status, headers=headers)
            response.content_length = answer.content_length
            if request.can_read_body:  # the source did not want it
                response.force_close()
            done()  # the source has the object before it answers
            await response.prepare(request)
            try:
                async for piece in answer.content.iter_any():
                    await _written(response, request, piece)
            except aiohttp.ClientError as error:
                raise ConnectionResetError("the source's answer ends early") from error
            done()  # the head of an answer to CompleteMultipartUpload comes first
            await response.write_eof()
        return response


async def invite(request: web.BaseRequest) -> None:
    """Let a client send its body that waits for that (100-continue)."""
    if request.headers.get("expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0


async def _written(response: web.StreamResponse, request: web.BaseRequest, piece: bytes) -> None:
    """Write a piece of an answer. Raises ConnectionError where the client is gone or too slow."""
    assert request.transport is not None, "its head was written"
    stalled = asyncio.get_running_loop().call_later(STALL_S, request.transport.abort)
    try:
        await response.write(piece)
    finally:
        stalled.cancel()


class _Body:
    """The body of a request, as it comes. `error` is what ended it early."""

    def __init__(self, request: web.BaseRequest, chunks: SignedChunks | None) -> None:
        self._request, self.chunks = request, chunks
        self.error: Exception | None = None

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield what is to be sent. Raises S3Error, and ConnectionError where the client is gone or too slow."""
        try:
            while data := await self._next():
                sent = data if self.chunks is None else self.chunks.feed(data)
                if sent:
                    yield sent
            if self.chunks is not None and not self.chunks.ended:
                raise S3Error("IncompleteBody", "the body ends before its last chunk")
        except Exception as error:
            self.error = error
            raise

    async def _next(self) -> bytes:
        transport = self._request.transport
        if transport is None:
            raise ConnectionResetError("the client is gone")
        stalled = asyncio.get_running_loop().call_later(STALL_S, transport.abort)
        try:
            return await self._request.content.readany()
        finally:
            stalled.cancel()


def _without_signatures(headers: dict[str, str], payload: str) -> str:
    """Change the headers of a body whose chunks lose their signatures; return the word for the new one."""
    headers.pop("content-length", None)
    if payload.endswith("-TRAILER"):
        return UNSIGNED_CHUNKS
    size = headers.pop("x-amz-decoded-content-length", "")
    if not size.isdecimal():
        raise S3Error("InvalidRequest", "x-amz-decoded-content-length is missing")
    headers["content-length"] = size
    codings = [each.strip() for each in headers.pop("content-encoding", "").split(",")]
    if kept := [each for each in codings if each and each != "aws-chunked"]:
        headers["content-encoding"] = ",".join(kept)
    return UNSIGNED


def passed_headers(given: Mapping[str, str]) -> dict[str, str]:
    """Return the headers that go to the source. Raises S3Error: NotImplemented for others, such as an access control list,
    which the source would take as the node's word."""
    for name, value in given.items():
        known = name in _PASSED or name in _LEFT or name.startswith((*_PASSED_PARTS, "x-amz-server-side-"))
        if name.startswith("x-amz-") and not known and (name, value) != ("x-amz-acl", "private"):
            raise S3Error("NotImplemented", f"the header {name} is not passed on: ask the source's endpoint")
    customer = "x-amz-server-side-encryption-customer"
    if any(name.startswith((customer, f"x-amz-copy-source-{customer[6:]}")) for name in given):
        raise S3Error("NotImplemented", "objects with keys of customers cannot be read through the cache")
    return {
        name: value
        for name, value in given.items()
        if name in _PASSED or name.startswith((*_PASSED_PARTS, "x-amz-server-side-"))
    }
