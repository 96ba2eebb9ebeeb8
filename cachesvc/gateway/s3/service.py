"""Answers the operations of S3 that read. `writes` has the others."""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from aiohttp import web

from cachesvc.core.errors import CacheError, NotFound, SourceChanged
from cachesvc.daemon.access.tenants import Tenants
from cachesvc.gateway.s3 import bodies, listings
from cachesvc.gateway.s3.bodies import Bodies
from cachesvc.gateway.s3.errors import S3Error, translated
from cachesvc.gateway.s3.keys import Keys
from cachesvc.gateway.s3.requests import Asked, asked, check_conditions, names_tag, span
from cachesvc.gateway.s3.upstream import Metadata, Upstream
from cachesvc.gateway.s3.writes import Writes
from cachesvc.sources.files import under

log = logging.getLogger(__name__)
XML = "application/xml"
TRIES = 3
"""Versions of an object that one request may meet: an object that changes while it is asked for."""
MAX_KEYS, MAX_BUCKETS = 1000, 10_000
_OPERATIONS = frozenset({
    "accelerate", "acl", "analytics", "attributes", "cors", "delete", "encryption", "inventory", "legal-hold", "lifecycle",
    "logging", "metrics", "notification", "object-lock", "ownershipControls", "partNumber", "policy", "policyStatus",
    "publicAccessBlock", "replication", "requestPayment", "retention", "tagging", "torrent", "uploadId", "uploads",
    "versionId", "versioning", "versions", "website",
})  # fmt: skip
"""Arguments that choose another operation than a read of an object or a listing."""
_OVERRIDES = {
    "response-cache-control": "cache-control",
    "response-content-disposition": "content-disposition",
    "response-content-encoding": "content-encoding",
    "response-content-language": "content-language",
    "response-content-type": "content-type",
    "response-expires": "expires",
}


class Service:
    """Handles requests. For one event loop."""

    def __init__(
        self,
        keys: Keys,
        tenants: Tenants,
        prefixes: Sequence[str],
        hosts: Sequence[str],
        upstream: Upstream,
        body: Bodies,
        writes: Writes,
        now: Callable[[], float] = time.time,
    ) -> None:
        """`prefixes`: the allowed ones, in their canonical form; none allow everything. `hosts`: names of this endpoint."""
        self._keys, self._tenants, self._prefixes, self._hosts = keys, tenants, prefixes, hosts
        self._upstream, self._bodies, self._writes, self._now = upstream, body, writes, now

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request."""
        number = secrets.token_hex(8)
        try:
            try:
                return await self._answer(request)
            except CacheError as error:
                raise translated(error) from error
            except (ConnectionError, S3Error):
                raise
            except Exception as error:
                log.exception("a request failed unexpectedly")
                raise S3Error("InternalError", "an unexpected error; the daemon's log has it") from error
        except S3Error as refusal:
            return _refused(request, refusal, number)
        except ConnectionError:
            if request.transport is not None:
                request.transport.abort()  # the client sees that the body is not complete
            raise

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        ask = asked(request, self._keys, self._hosts, self._now())
        named = _OPERATIONS.intersection(ask.given)
        if ask.method not in ("GET", "HEAD") or "uploadId" in named:
            return await self._writes.answer(request, ask, named)
        if other := named - {"partNumber"} - ({"versionId"} if ask.key else set()):
            raise S3Error("NotImplemented", f"{min(other)} is not served: ask the source's endpoint")
        if ask.key:
            return await self._object(request, ask)
        if not ask.bucket:
            return _document(_page_of_buckets(await self._buckets(ask), ask.given))
        try:
            return await self._bucket(ask)
        except NotFound as error:
            raise translated(error, "NoSuchBucket") from error

    # Buckets.

    async def _buckets(self, ask: Asked) -> list[str]:
        if self._prefixes:
            allowed = [each for each in self._tenants.prefixes(ask.user) if each.startswith("s3://")]
            return sorted({each.removeprefix("s3://").partition("/")[0] for each in allowed})
        return await self._upstream.buckets()

    async def _bucket(self, ask: Asked) -> web.StreamResponse:
        if not self._may_list(ask, ""):
            raise S3Error("AccessDenied", f"s3://{ask.bucket}/ is not below a prefix that you may use")
        if ask.method == "HEAD":
            region = await self._upstream.bucket(ask.bucket)
            return web.Response(headers={"x-amz-bucket-region": region or "us-east-1"})
        if "location" in ask.given:
            return _document(listings.location(await self._upstream.bucket(ask.bucket)))
        return await self._listing(ask)

    async def _listing(self, ask: Asked) -> web.StreamResponse:
        given, prefix = ask.given, ask.given.get("prefix", "")
        folder = f"s3://{ask.bucket}/{prefix}".rpartition("/")[0]
        if not self._tenants.may_read(folder, ask.user) and not (
            given.get("delimiter") == "/" and self._may_list(ask, prefix)
        ):
            raise S3Error(
                "AccessDenied", f"s3://{ask.bucket}/{prefix} is not below a prefix that you may use"
            )
        page = await self._upstream.page(ask.bucket, "list-type" in given, **_arguments(given))

        def visible(name: str) -> bool:
            uri = f"s3://{ask.bucket}/{name}"
            return self._tenants.may_read(uri, ask.user) or (name.endswith("/") and self._may_list(ask, name))

        return _document(listings.listing(ask.bucket, given, page, visible))

    def _may_list(self, ask: Asked, prefix: str) -> bool:
        """Tell whether something below a prefix, which ends with a slash or is empty, is the user's to read."""
        uri = f"s3://{ask.bucket}/{prefix}".rstrip("/")
        if self._tenants.may_read(uri, ask.user):
            return True
        return any(under(each, (uri,)) for each in self._tenants.prefixes(ask.user))

    # Objects.

    async def _object(self, request: web.BaseRequest, ask: Asked) -> web.StreamResponse:
        if not self._tenants.may_read(ask.uri, ask.user):
            raise S3Error("AccessDenied", f"{ask.uri} is not below a prefix that you may use")
        if "versionId" in ask.given:
            return await self._writes.version(request, ask)
        part = _part_number(ask.given)
        anew = False
        for tries_left in range(TRIES - 1, -1, -1):
            found = await self._metadata(ask, part, anew)
            try:
                check_conditions(ask.headers, found.etag, found.headers.get("last-modified", ""))
                return await self._sent(request, ask, found)
            except (SourceChanged, S3Error) as error:
                if isinstance(error, S3Error) and (error.code != "PreconditionFailed" or anew):
                    raise
                if not tries_left:
                    raise
                anew = True
        raise AssertionError("the last try returns or raises")

    async def _metadata(self, ask: Asked, part: int, anew: bool) -> Metadata:
        if not part and not anew:
            self._begin(ask)
        found = await self._upstream.head(ask.bucket, ask.key, part, anew)
        wanted = ask.headers.get("if-match")
        if wanted is not None and not names_tag(wanted, found.etag) and not anew:
            found = await self._upstream.head(ask.bucket, ask.key, part, anew=True)
        return found

    def _begin(self, ask: Asked) -> None:
        """Begin to fetch what a plain GET will send if the object is still the one that was listed: the source is then
        asked for bytes and metadata side by side."""
        if ask.method != "GET" or any(name.startswith("if-") for name in ask.headers):
            return
        version = self._upstream.expected(ask.bucket, ask.key)
        if version is not None and version.size_bytes:
            with suppress(S3Error):
                named = span(ask.headers.get("range", ""), version.size_bytes)
                self._bodies.begin(version, *(named or (0, version.size_bytes)))

    async def _sent(self, request: web.BaseRequest, ask: Asked, found: Metadata) -> web.StreamResponse:
        """Send an object, or a range of it. Raises before the head is sent: SourceChanged, S3Error and the errors of
        fills; later ConnectionError."""
        size_bytes = found.version.size_bytes
        begin, end, status = 0, size_bytes, 200
        if found.span is not None:
            (begin, end), status = found.span, 206
        elif (stated := ask.headers.get("range")) and (named := span(stated, size_bytes)) is not None:
            (begin, end), status = named, 206
        headers = _headers(ask, found, whole=status == 200)
        if status == 206:
            headers["content-range"] = f"bytes {begin}-{end - 1}/{size_bytes}"
        if ask.method == "HEAD" or begin == end:
            response = web.StreamResponse(status=status, headers=headers)
            response.content_length = end - begin
            await response.prepare(request)
            await response.write_eof()
            return response
        return await self._body(request, found, begin, end, status, headers)

    async def _body(
        self,
        request: web.BaseRequest,
        found: Metadata,
        begin: int,
        end: int,
        status: int,
        headers: dict[str, str],
    ) -> web.StreamResponse:
        async with self._bodies.pieces(found.version, begin, end) as pieces:
            piece = await anext(pieces)
            if piece.size_bytes == end - begin <= bodies.WRITE_BYTES:
                return web.Response(body=bodies.in_memory(piece), status=status, headers=headers)
            response = web.StreamResponse(status=status, headers=headers)
            response.content_length = end - begin
            await response.prepare(request)
            try:
                await bodies.send(response, request, piece)
                async for piece in pieces:
                    await bodies.send(response, request, piece)
            except CacheError as error:
                log.warning("a body ends early", extra={"uri": found.version.uri, "error": str(error)})
                raise ConnectionResetError("the body cannot be completed") from error
        await response.write_eof()
        return response


def _headers(ask: Asked, found: Metadata, whole: bool) -> dict[str, str]:
    """Return the headers of an object's answer. Checksums are those of the whole object, and for who asks."""
    checksums = whole and ask.headers.get("x-amz-checksum-mode", "").upper() == "ENABLED"
    headers = {
        name: value
        for name, value in found.headers.items()
        if checksums or not name.startswith("x-amz-checksum-")
    }
    headers |= {name: ask.given[argument] for argument, name in _OVERRIDES.items() if argument in ask.given}
    headers.setdefault("content-type", "binary/octet-stream")
    return headers | {"accept-ranges": "bytes"}


def _part_number(given: dict[str, str]) -> int:
    text = given.get("partNumber", "")
    if text and not re.fullmatch(r"[1-9]\d{0,4}", text):
        raise S3Error("InvalidArgument", "partNumber must be 1 to 10,000")
    return int(text or 0)


def _arguments(given: dict[str, str]) -> dict[str, Any]:
    """Return the arguments of boto3 for those of a listing's query. Raises S3Error."""
    names = {"prefix": "Prefix", "delimiter": "Delimiter"}
    if "list-type" not in given:
        names |= {"marker": "Marker"}
    elif given["list-type"] != "2":
        raise S3Error("InvalidArgument", "list-type must be 2")
    else:
        names |= {"start-after": "StartAfter", "continuation-token": "ContinuationToken"}
    found: dict[str, Any] = {names[name]: value for name, value in given.items() if value and name in names}
    if given.get("fetch-owner") == "true" and "list-type" in given:
        found["FetchOwner"] = True
    return found | {"MaxKeys": min(_number(given, "max-keys", MAX_KEYS), MAX_KEYS)}


def _page_of_buckets(names: Sequence[str], given: dict[str, str]) -> bytes:
    most = _number(given, "max-buckets", MAX_BUCKETS)
    if not 0 < most <= MAX_BUCKETS:
        raise S3Error("InvalidArgument", f"max-buckets must be 1 to {MAX_BUCKETS:,}")
    return listings.buckets(names, given.get("prefix", ""), given.get("continuation-token", ""), most)


def _number(given: dict[str, str], name: str, otherwise: int) -> int:
    text = given.get(name, str(otherwise))
    if not re.fullmatch(r"\d{1,9}", text):
        raise S3Error("InvalidArgument", f"{name} is no number")
    return int(text)


def _document(body: bytes) -> web.StreamResponse:
    return web.Response(body=body, content_type=XML)


def _refused(request: web.BaseRequest, refusal: S3Error, number: str) -> web.StreamResponse:
    if refusal.status in (500, 503):
        log.warning("a request is not answered", extra={"path": request.path, "error": str(refusal)})
    headers = {"x-amz-request-id": number, **refusal.headers}
    if refusal.status == 304 or request.method == "HEAD":
        return web.Response(status=refusal.status, headers=headers)
    body = refusal.body(request.path, number)
    response = web.Response(status=refusal.status, headers=headers, body=body, content_type=XML)
    if request.can_read_body:  # it is not read, so the connection ends, and the client is told so
        response.force_close()
    return response
