"""Checks that an answer to a GET holds exactly the bytes that were asked for, of that version, as stored."""

from __future__ import annotations

from cachesvc.core.errors import SourceUnavailable
from cachesvc.core.model import ObjectVersion
from cachesvc.sources.s3 import etags as tags
from cachesvc.sources.s3.http import Response, UnexpectedResponse, number

_NONE = ("", "identity", "aws-chunked")
"""Content encodings that change no byte of what is stored. SDKs leave `aws-chunked` behind from their uploads."""


class OtherVersion(SourceUnavailable):
    """An answer that seems to be of another version of the object, until a HEAD says so. `conditional`: it is no more than
    that an If-Match was refused."""

    conditional = False


def verify(version: ObjectVersion, offset: int, size: int, answer: Response) -> None:
    """Check an answer of 200 or 206 before its body is read. Raises UnexpectedResponse for another form or length, and
    OtherVersion."""
    uri, span = version.uri, answer.headers.get("content-range")
    stored = encoding_of(answer.headers)
    if stored and "content-encoding" not in answer.headers:
        raise UnexpectedResponse(f"the server decoded {uri}, which is stored with Content-Encoding: {stored}")
    if answer.status == 206 and span is not None:
        served, _, total = span.removeprefix("bytes ").partition("/")
        if number(total) not in (None, version.size_bytes):
            raise OtherVersion(f"{uri} has {total} bytes, not {version.size_bytes}")
        if served != f"{offset}-{offset + size - 1}":
            raise UnexpectedResponse(f"the server answered bytes {served} of {uri}, not those asked for")
    elif answer.status == 206 or span is not None or offset or size != version.size_bytes:
        raise UnexpectedResponse(f"the server ignored the byte range asked of {uri}")
    if version.etag and not tags.same(answer.headers.get("etag", ""), version.etag):
        raise OtherVersion(f"{uri} is no longer the version {version.etag}")
    if answer.length != size and not answer.chunked:
        raise UnexpectedResponse(f"the server announced {answer.length} bytes of {uri}, not {size}")


def encoding_of(headers: dict[str, str]) -> str:
    """The content encoding in which an object is stored; empty where the server names none. Google Cloud Storage names it
    in a header of its own where it decodes."""
    named = headers.get("x-goog-stored-content-encoding") or headers.get("content-encoding", "")
    kept = [each.strip() for each in named.split(",") if each.strip().lower() not in _NONE]
    return ", ".join(kept)
