"""Pages of an S3 listing, by version 2 of the request, or by version 1 for servers that know only that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from cachesvc.core.errors import InvalidInput, SourceUnavailable

_FIELDS = ("IsTruncated", "Name", "MaxKeys", "KeyCount", "Contents")
"""Every listing, also an empty one, has some of these."""
_MAX_OBJECT_BYTES = 1 << 50
Call = Callable[..., Any]
"""`call(prefix, operation, **arguments)` sends one request through boto3."""


def rows(call: Call, prefix: str, bucket: str, key: str) -> Iterator[dict[str, Any]]:
    """Yield every object whose key begins with `key`. A page without a continuation token comes from a server that knows
    version 1 only. Raises SourceUnavailable for a listing that does not advance."""
    start: dict[str, str] = {}
    while True:
        page = call(prefix, "list_objects_v2", Bucket=bucket, Prefix=key, **start)
        yield from contents(prefix, page)
        if not page.get("IsTruncated"):
            return
        token = page.get("NextContinuationToken", "")
        if not token:
            yield from _rows_v1(call, prefix, bucket, key, _marker(prefix, page, ""))
            return
        if token == start.get("ContinuationToken"):
            raise _broken(prefix)
        start = {"ContinuationToken": token}


def _rows_v1(call: Call, prefix: str, bucket: str, key: str, marker: str) -> Iterator[dict[str, Any]]:
    """Yield the objects whose keys follow `marker`, by version 1."""
    while True:
        page = call(prefix, "list_objects", Bucket=bucket, Prefix=key, Marker=marker)
        yield from contents(prefix, page)
        if not page.get("IsTruncated"):
            return
        marker = _marker(prefix, page, marker)


def _marker(prefix: str, page: dict[str, Any], before: str) -> str:
    """Return the marker of the next page; the last key, if the server states none."""
    found = contents(prefix, page)
    marker: str = page.get("NextMarker") or (found[-1]["Key"] if found else "")
    if marker in ("", before):
        raise _broken(prefix)
    return marker


def contents(prefix: str, page: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the objects of a page. Raises SourceUnavailable for objects without names or sizes, InvalidInput for a page
    that is no listing: botocore parses the login page of a proxy as an empty one."""
    if not any(field in page for field in _FIELDS):
        raise InvalidInput(
            f"{prefix}: the answer is no S3 listing, but perhaps a web page; check the endpoint (AWS_ENDPOINT_URL) and the "
            "proxies on the way"
        )
    found: list[dict[str, Any]] = page.get("Contents", [])
    if any("Key" not in row or not 0 <= row.get("Size", -1) < _MAX_OBJECT_BYTES for row in found):
        raise SourceUnavailable(f"{prefix}: the server lists objects without their names or sizes")
    return found


def _broken(prefix: str) -> SourceUnavailable:
    return SourceUnavailable(f"{prefix}: the server broke off its listing; list again")
