"""Pages of an S3 listing, by version 2 of the request, or by version 1 for servers that know only that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from cachesvc.core.errors import SourceUnavailable
from cachesvc.sources.source import Send

_FIELDS = ("IsTruncated", "Name", "MaxKeys", "KeyCount", "Contents")
"""Every listing, also an empty one, has some of these."""
_MAX_OBJECT_BYTES = 1 << 50
Call = Callable[..., Any]
"""`call(prefix, operation, **arguments)` sends one request through boto3."""
Rows = list[dict[str, Any]]


def rows(call: Call, send: Send, prefix: str, bucket: str, key: str) -> Iterator[dict[str, Any]]:
    """Yield every object whose key begins with `key`. A page without a continuation token comes from a server that knows
    version 1 only. Raises SourceUnavailable for a listing that does not advance."""
    token = ""
    while True:
        start = {"ContinuationToken": token} if token else {}
        page, found = send(partial(ask, call, prefix, "list_objects_v2", Bucket=bucket, Prefix=key, **start))
        yield from found
        if not page.get("IsTruncated"):
            return
        before, token = token, page.get("NextContinuationToken", "")
        if not token:
            yield from _rows_v1(call, send, prefix, bucket, key, _marker(prefix, page, found, ""))
            return
        if token == before:
            raise _broken(prefix)


def _rows_v1(
    call: Call, send: Send, prefix: str, bucket: str, key: str, marker: str
) -> Iterator[dict[str, Any]]:
    """Yield the objects whose keys follow `marker`, by version 1."""
    while True:
        page, found = send(
            partial(ask, call, prefix, "list_objects", Bucket=bucket, Prefix=key, Marker=marker)
        )
        yield from found
        if not page.get("IsTruncated"):
            return
        marker = _marker(prefix, page, found, marker)


def ask(call: Call, prefix: str, operation: str, **arguments: str | int) -> tuple[dict[str, Any], Rows]:
    """Request one page. Return it, and its objects. Raises as `call`, and SourceUnavailable for a page that is no
    listing."""
    page = call(prefix, operation, **arguments)
    return page, _contents(prefix, page)


def _marker(prefix: str, page: dict[str, Any], found: Rows, before: str) -> str:
    """Return the marker of the next page; the last key, if the server states none."""
    marker: str = page.get("NextMarker") or (found[-1]["Key"] if found else "")
    if marker in ("", before):
        raise _broken(prefix)
    return marker


def _contents(prefix: str, page: dict[str, Any]) -> Rows:
    """Return the objects of a page. Raises SourceUnavailable for objects without names or sizes, and for a page that is no
    listing, which botocore parses as an empty one."""
    if not any(field in page for field in _FIELDS):
        kind = page["ResponseMetadata"]["HTTPHeaders"].get("content-type", "no content type")
        raise SourceUnavailable(
            f"{prefix}: the answer is no S3 listing ({kind}); check the endpoint (AWS_ENDPOINT_URL) and the proxies on the"
            " way"
        )
    found: Rows = page.get("Contents", [])
    if any("Key" not in row or not 0 <= row.get("Size", -1) < _MAX_OBJECT_BYTES for row in found):
        raise SourceUnavailable(f"{prefix}: the server lists objects without their names or sizes")
    return found


def _broken(prefix: str) -> SourceUnavailable:
    return SourceUnavailable(f"{prefix}: the server broke off its listing; list again")
