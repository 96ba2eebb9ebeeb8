"""Requests: who asks, for which bucket, key and range, with which arguments and conditions (RFC 9110). Pure but for its
reading of the request."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from urllib.parse import unquote

from aiohttp import web

from cachesvc.daemon.access.tenants import Peer
from cachesvc.gateway.s3 import signature
from cachesvc.gateway.s3.errors import S3Error
from cachesvc.gateway.s3.keys import Keys
from cachesvc.sources.web.client import is_address

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,62}")
MAX_KEY_BYTES = 1024
SIGNED_CHUNKS = "STREAMING-AWS4-HMAC-SHA256-PAYLOAD"
"""Begins the payload's word where each chunk of the body has a signature."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request. `bucket` and `key`: "" where it names none. `given`: the arguments of its query. `headers`: by name in
    lower case."""

    method: str
    bucket: str
    key: str
    given: dict[str, str]
    headers: dict[str, str]
    user: Peer
    payload: str = signature.EMPTY
    """The SHA-256 of the body, or a word that stands for it."""
    chunks: signature.ChunkSignatures | None = None
    """Of a body whose chunks are signed."""

    @property
    def uri(self) -> str:
        """The URI of the object, or of the bucket."""
        return f"s3://{self.bucket}/{self.key}"


def asked(request: web.BaseRequest, keys: Keys, hosts: Sequence[str], now: float) -> Asked:
    """Return what a request asks, once its signature is verified. `hosts`: names of this endpoint. Raises S3Error."""
    path, _, text = request.raw_path.partition("?")
    headers = {name.lower(): value for name, value in request.headers.items()}
    query = signature.query_of(text)
    claim = signature.claimed(headers, query, now)
    user, secret = keys.recognise(claim.access_key, claim.token, now)
    signature.check(claim, secret, request.method, path, query, headers)
    bucket, key = place(path, headers.get("host", ""), hosts)
    signed = claim.payload.startswith(SIGNED_CHUNKS)
    chunks = signature.ChunkSignatures(claim, secret) if signed else None
    return Asked(request.method, bucket, key, dict(query), headers, user, claim.payload, chunks)


def place(path: str, host: str, hosts: Sequence[str]) -> tuple[str, str]:
    """Return the bucket and key of a path, as it was sent, or of a host `BUCKET.HOST`. Raises S3Error."""
    try:
        plain = unquote(path, errors="strict").removeprefix("/")
    except UnicodeDecodeError:
        raise S3Error("InvalidURI", "the key is not UTF-8") from None
    name = re.sub(r":\d+$", "", host).lower()
    of_host = next((name[: -len(each) - 1] for each in hosts if name.endswith(f".{each}")), "")
    if of_host and not is_address(name):
        bucket, key = of_host, plain
    else:
        bucket, _, key = plain.partition("/")
    if bucket and not _BUCKET.fullmatch(bucket):
        raise S3Error("InvalidURI", f"{bucket[:100]!r} is no name of a bucket")
    if len(key.encode()) > MAX_KEY_BYTES:
        raise S3Error("InvalidURI", f"a key has at most {MAX_KEY_BYTES} bytes")
    return bucket, key


_RANGE = re.compile(r"bytes=(\d{0,20})-(\d{0,20})")


def span(header: str, size_bytes: int) -> tuple[int, int] | None:
    """Return the bytes [begin, end) that a Range header names; None where it is to be ignored, as one of several ranges.

    Raises S3Error: InvalidRange for a range that begins behind the last byte.
    """
    found = _RANGE.fullmatch(header.strip())
    if found is None or found[0] == "bytes=-":
        return None
    if not found[1]:
        begin, end = max(0, size_bytes - int(found[2])), size_bytes
        satisfiable = int(found[2]) > 0 and size_bytes > 0
    else:
        begin = int(found[1])
        last = int(found[2]) if found[2] else size_bytes - 1
        if found[2] and last < begin:
            return None
        end, satisfiable = min(last + 1, size_bytes), begin < size_bytes
    if not satisfiable:
        raise S3Error(
            "InvalidRange",
            f"the object has {size_bytes} bytes, and none of those that {header} names",
            Content_Range=f"bytes */{size_bytes}",
        )
    return begin, end


def check_conditions(headers: Mapping[str, str], etag: str, last_modified: str) -> None:
    """Evaluate the conditions of a request. `headers`: by name in lower case. `etag`: with its quotes.

    Raises S3Error: PreconditionFailed, NotModified.
    """
    if_match, if_none_match = headers.get("if-match"), headers.get("if-none-match")
    if if_match is not None:
        if not names_tag(if_match, etag):
            raise S3Error("PreconditionFailed", "the object has another ETag than If-Match names")
    elif _is_after(last_modified, headers.get("if-unmodified-since")):
        raise S3Error("PreconditionFailed", "the object was modified since")
    if if_none_match is not None:
        if names_tag(if_none_match, etag):
            raise S3Error("NotModified", "", ETag=etag, Last_Modified=last_modified)
    elif (since := headers.get("if-modified-since")) and _is_after(last_modified, since) is False:
        raise S3Error("NotModified", "", ETag=etag, Last_Modified=last_modified)


def names_tag(header: str, etag: str) -> bool:
    """Tell whether a list of ETags names this one. Some clients leave the quotes out."""
    given = {tag.strip().removeprefix("W/").strip('"') for tag in header.split(",")}
    return "*" in given or etag.strip('"') in given


def _is_after(last_modified: str, since: str | None) -> bool | None:
    """Tell whether an object was modified after a time; None where a time is missing or malformed."""
    if since is None:
        return None
    try:
        return parsedate_to_datetime(last_modified) > parsedate_to_datetime(since)
    except (ValueError, TypeError):
        return None
