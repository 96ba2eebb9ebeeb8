"""Pages of an S3 listing, by version 2 of the request."""

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
    """Yield every object whose key begins with `key`. Raises SourceUnavailable for a listing that does not advance."""
    token = ""
    while True:
        start = {"ContinuationToken": token} if token else {}
        page, found = send(partial(ask, call, prefix, "list_objects_v2", Bucket=bucket, Prefix=key, **start))
        yield from found
        if not page.get("IsTruncated"):
            return
        before, token = token, page.get("NextContinuationToken", "")
        if token in ("", before):
            raise SourceUnavailable(f"{prefix}: the server broke off its listing (ListObjectsV2); list again")


def ask(call: Call, prefix: str, operation: str, **arguments: str | int) -> tuple[dict[str, Any], Rows]:
    """Request one page. Return it, and its objects. Raises as `call`, and SourceUnavailable for a page that is no
    listing."""
    page = call(prefix, operation, **arguments)
    return page, _contents(prefix, page)


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
