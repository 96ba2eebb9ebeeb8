"""Documents of listings, made from what boto3 returns for the source's own. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import Any
from urllib.parse import quote
from xml.sax.saxutils import escape

_NAMESPACE = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'
_ECHOED = {
    "Delimiter": "delimiter",
    "StartAfter": "start-after",
    "ContinuationToken": "continuation-token",
    "Marker": "marker",
}
"""Elements that repeat an argument, and its name in the query."""
_ENDS = {"\r": "&#13;"}
"""Parsers of XML take a carriage return for a line feed: a token with one would lead to another page."""
_ENCODED = ("Prefix", "Delimiter", "StartAfter", "Marker", "NextMarker", "Key")


def listing(
    bucket: str, given: dict[str, str], page: dict[str, Any], visible: Callable[[str], bool]
) -> bytes:
    """Return the document of a page of ListObjectsV2, or of ListObjects where `given` has no `list-type`.

    `given`: the arguments of the query. `visible`: tells whether the client may see a key, or what lies below a common
    prefix.
    """
    url = given.get("encoding-type") == "url"
    rows = [row for row in page.get("Contents", ()) if visible(row["Key"])]
    prefixes = [each["Prefix"] for each in page.get("CommonPrefixes", ()) if visible(each["Prefix"])]
    second, prefix = "list-type" in given, [("Prefix", given.get("prefix", ""))]
    fields: list[tuple[str, object]] = [("Name", bucket)]
    echoed = ({} if second else {"Marker": ""}) | {
        name: given[argument] for name, argument in _ECHOED.items() if argument in given
    }
    fields += [(name, text) for name, text in echoed.items() if text or name != "Delimiter"]
    fields.append(("MaxKeys", page.get("MaxKeys", 1000)))
    if second:
        fields.append(("KeyCount", len(rows) + len(prefixes)))
    if url:
        fields.append(("EncodingType", "url"))
    fields.append(("IsTruncated", bool(page.get("IsTruncated"))))
    fields += [(name, page[name]) for name in ("NextContinuationToken",) if page.get(name)]
    if not second and page.get("IsTruncated"):
        fields.append(("NextMarker", page.get("NextMarker") or page["Contents"][-1]["Key"]))
    parts = [
        _elements(fields, url),
        _elements(prefix, url and second),
    ]  # clients decode that of the second version
    parts += [f"<Contents>{_elements(_row(row), url)}{_owner(row)}</Contents>" for row in rows]
    parts += [f"<CommonPrefixes>{_elements([('Prefix', each)], url)}</CommonPrefixes>" for each in prefixes]
    return _document("ListBucketResult", parts)


def buckets(names: Sequence[str], prefix: str, after: str, most: int) -> bytes:
    """Return the document of ListBuckets: at most so many of those that begin with a prefix, behind the name `after`. The
    node does not know when buckets were created."""
    made, left = "1970-01-01T00:00:00.000Z", sorted(name for name in names if name > after)
    left = [name for name in left if name.startswith(prefix)]
    rows = [
        f"<Bucket>{_elements([('Name', name), ('CreationDate', made)], False)}</Bucket>"
        for name in left[:most]
    ]
    more = [("ContinuationToken", left[most - 1])] if len(left) > most else []
    return _document("ListAllMyBucketsResult", ["<Buckets>", *rows, "</Buckets>", _elements(more, False)])


def location(region: str) -> bytes:
    """Return the document of GetBucketLocation; us-east-1 is the empty one."""
    return _document("LocationConstraint", [escape("" if region == "us-east-1" else region)])


def _row(row: dict[str, Any]) -> list[tuple[str, object]]:
    names = ("Key", "LastModified", "ETag", "Size", "StorageClass")
    return [(name, row[name]) for name in names if name in row]


def _owner(row: dict[str, Any]) -> str:
    """Return who owns an object, which ListObjects states always, and ListObjectsV2 where it is asked."""
    return f"<Owner>{_elements(row['Owner'].items(), False)}</Owner>" if "Owner" in row else ""


def _elements(fields: Iterable[tuple[str, object]], url: bool) -> str:
    return "".join(f"<{name}>{_text(name, value, url)}</{name}>" for name, value in fields)


def _text(name: str, value: object, url: bool) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, datetime):
        return value.strftime("%Y-%m-%dT%H:%M:%S.000Z")
    return quote(str(value), "/") if url and name in _ENCODED else escape(str(value), _ENDS)


def _document(name: str, parts: Sequence[str]) -> bytes:
    head = f'<?xml version="1.0" encoding="UTF-8"?>\n<{name} {_NAMESPACE}>'
    return f"{head}{''.join(parts)}</{name}>".encode("utf-8", "replace")
