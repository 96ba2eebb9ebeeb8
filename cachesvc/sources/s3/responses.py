"""Checks that the response to a GET contains exactly the requested bytes of that version, as stored.

Entity tags are compared weakly (RFC 9110, 8.8.3.2): reads need the same object, not the same response. Quotes and `W/` are
syntax: listings carry tags in XML, responses in headers, and gateways rewrite one of them. Hex digests are compared without
case; other tags are opaque.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping

from cachesvc.core.errors import CorruptData, SourceUnavailable
from cachesvc.core.model import ObjectVersion
from cachesvc.sources.s3.http import HttpConnection, Response, UnexpectedResponse, parse_number
from cachesvc.sources.source import OnReceived

_NONE = ("", "identity", "aws-chunked")
"""Content encodings that change no stored byte. SDKs leave `aws-chunked` behind from their uploads."""


_ENDINGS = {
    "gzip": (".gz", ".tgz", ".gzip"),
    "compress": (".z",),
    "zstd": (".zst", ".zstd"),
    "br": (".br",),
    "bzip2": (".bz2",),
    "xz": (".xz",),
    "lz4": (".lz4",),
}
"""Ends of the names of files that are themselves in an encoding: web servers and uploaders name it for those, too."""
_DIGEST = re.compile(r"[0-9a-fA-F]{32,128}(?:-[0-9]{1,5})?")
_MOST_FAULTS = 1 << 12
_PAGES = (".htm", ".html", ".xhtml", ".php", ".asp", ".aspx", ".jsp")
"""Names of objects that may be web pages themselves."""


class OtherVersion(SourceUnavailable):
    """A response that seems to be of another version of the object; a HEAD will decide. `conditional`: the only sign of
    it is a refused If-Match."""

    conditional = False


class RepeatedFaults:
    """Reads whose last response was complete and wrong. Once may be transient; twice in a row lasts. Thread-safe."""

    def __init__(self) -> None:
        self._failed: dict[tuple[str, int], bytes] = {}
        self._lock = threading.Lock()

    def failed(self, uri: str, offset: int, digest: bytes = b"") -> bool:
        """Note a wrong response, with the digest of its bytes where these are to be wrong in the same way. Tell whether the
        previous read at that offset was wrong too."""
        with self._lock:
            again = self._failed.get((uri, offset)) == digest
            if len(self._failed) >= _MOST_FAULTS:
                self._failed.clear()
            self._failed[uri, offset] = digest
        return again

    def succeeded(self, uri: str, offset: int) -> None:
        """Note a right response."""
        if self._failed:
            with self._lock:
                self._failed.pop((uri, offset), None)


def verify(version: ObjectVersion, offset: int, size: int, response: Response) -> None:
    """Check a response with status 200 or 206 before its body is read. Raises UnexpectedResponse for another form or length
    than was requested, OtherVersion, and as `check_encoding`."""
    uri, span = version.uri, response.headers.get("content-range")
    check_no_page(uri, response.headers)
    stored = check_encoding(uri, encoding_of(response.headers))
    if stored and "content-encoding" not in response.headers:
        raise UnexpectedResponse(f"the server decoded {uri}, which is stored with Content-Encoding: {stored}")
    if response.status == 206 and span is not None:
        served, _, total = span.removeprefix("bytes ").partition("/")
        if parse_number(total) not in (None, version.size_bytes):
            raise OtherVersion(f"{uri} has {total} bytes, not {version.size_bytes}")
        if served != f"{offset}-{offset + size - 1}":
            raise UnexpectedResponse(f"the server answered bytes {served} of {uri}, not those asked for")
    elif response.status == 206 or span is not None or offset or size != version.size_bytes:
        raise UnexpectedResponse(f"the server ignored the byte range asked of {uri}")
    if version.etag and not same_tag(response.headers.get("etag", ""), version.etag):
        raise OtherVersion(f"{uri} is no longer the version {version.etag}")
    if response.length != size and not response.chunked:
        raise UnexpectedResponse(f"the server announced {response.length} bytes of {uri}, not {size}")


def receive_body(
    connection: HttpConnection, response: Response, into: memoryview, received: OnReceived
) -> None:
    """Receive the body of a response that was verified. Raises as `HttpConnection.read_into`; the error says how much of
    `into` has come."""
    before = connection.received_bytes
    try:
        connection.read_into(into, received)
    except SourceUnavailable as error:
        if not response.chunked:  # what came of a malformed body is not trusted
            error.kept_bytes = connection.received_bytes - before
        raise


def check_no_page(uri: str, headers: Mapping[str, str]) -> None:
    """Raise SourceUnavailable for a web page in the place of an object, such as a proxy sends with status 200 while the
    server behind it is down: it has no entity tag."""
    kind, name = headers.get("content-type", ""), _name(uri)
    data = "." in name and not name.endswith(_PAGES)
    if data and kind.lower().startswith("text/html") and not headers.get("etag"):
        raise SourceUnavailable(
            f"{uri}: the answer is a web page ({kind}) without an ETag, not the object; check the endpoint and the proxies"
            " on the way"
        )


def check_encoding(uri: str, encoding: str) -> str:
    """Return the content encoding in which an object is stored. Raises CorruptData where its name does not say so: its
    bytes are not those of the file that the name promises, which browsers and other clients decode."""
    name = _name(uri)
    for each in filter(None, encoding.lower().split(", ")):
        if not name.endswith(_ENDINGS.get(each.removeprefix("x-"), ())):
            raise CorruptData(
                f"{uri} is stored with Content-Encoding: {encoding}, so its bytes are not the file's: store it without that"
                " header, decoded, or under a name that ends as such files do (.gz)"
            )
    return encoding


def encoding_of(headers: dict[str, str]) -> str:
    """Return the content encoding in which an object is stored; empty for none. Google Cloud Storage states it in a
    header of its own when it decodes."""
    named = headers.get("x-goog-stored-content-encoding") or headers.get("content-encoding", "")
    kept = [each.strip() for each in named.split(",") if each.strip().lower() not in _NONE]
    return ", ".join(kept)


def _name(uri: str) -> str:
    """Return the last segment of a URI in lower case. A URL's query is no part of it."""
    path = uri.partition("?")[0] if uri.startswith(("http://", "https://")) else uri
    return path.rpartition("/")[2].lower()


def same_tag(tag: str, other: str) -> bool:
    """Tell whether two tags name the same version of an object."""
    return _opaque(tag) == _opaque(other)


def is_strong_tag(tag: str) -> bool:
    """Tell whether `If-Match` can succeed with a tag: it compares strongly, so a weak tag matches nothing."""
    return bool(tag) and tag[:2] not in ("W/", "w/")


def _opaque(tag: str) -> str:
    tag = tag.strip()
    tag = (tag if is_strong_tag(tag) else tag[2:]).strip('"')
    return tag.lower() if _DIGEST.fullmatch(tag) else tag
