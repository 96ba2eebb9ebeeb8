"""Ranges and conditions of a request (RFC 9110), as S3 reads them. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from email.utils import parsedate_to_datetime

from cachesvc.gateway.s3.errors import S3Error

_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")


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
    try:
        return parsedate_to_datetime(last_modified) > parsedate_to_datetime(since or "")
    except (ValueError, TypeError):
        return None
