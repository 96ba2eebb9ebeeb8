"""The source of single files on web servers. A web server has no listing, so files are named: one URL, or braces."""

from __future__ import annotations

from collections.abc import Iterator

from cachesvc.core.errors import InvalidInput, SourceChanged
from cachesvc.core.model import ObjectVersion
from cachesvc.sources.s3.http import HttpConnection, Response, parse_number
from cachesvc.sources.s3.responses import (
    RepeatedFaults,
    check_encoding,
    check_no_page,
    encoding_of,
    is_strong_tag,
    same_tag,
)
from cachesvc.sources.source import OnReceived, Source, ignore_received
from cachesvc.sources.web.client import WebClient, receive, refusal

MAX_SKIPPED_BYTES = 64 << 20
"""Bytes before a range that are received in vain from a server that serves no ranges."""
_SKIP_BYTES = 1 << 20


class WebSource(Source):
    """A `Source` of the files of web servers. A version is the entity tag, else the time of the last modification."""

    def __init__(self, max_skipped_bytes: int = MAX_SKIPPED_BYTES) -> None:
        self._client, self._repeated = WebClient(), RepeatedFaults()
        self._max_skipped_bytes = max_skipped_bytes

    def list(self, prefix: str) -> Iterator[ObjectVersion]:
        """Yield the file that the URL names. Raises NotFound, and InvalidInput for a folder."""
        if prefix.endswith("/") or prefix.count("/") < 3:
            raise InvalidInput(
                f"{prefix}: a web server's folder cannot be listed; name its files, as in {prefix.rstrip('/')}/{{0..9}}.tar"
            )
        yield self.head(prefix)

    def head(self, uri: str) -> ObjectVersion:
        """Return the file's current version. Asks for its first byte, since many servers and signed URLs refuse a HEAD."""
        with self._client.follow(uri, {"Range": "bytes=0-0"}) as (response, connection):
            if response.status not in (200, 206, 416):
                connection.read_error(response)
                raise refusal(uri, response)
            check_no_page(uri, response.headers)
            check_encoding(uri, encoding_of(response.headers))
            size = response.length
            if response.status != 200:
                size = parse_number(response.headers.get("content-range", "").rpartition("/")[2])
                connection.read_error(response)
            if size is None:
                raise InvalidInput(f"{uri}: the server does not say how long it is, so it cannot be cached")
            return ObjectVersion(uri, size, _tag(response).strip('"'))

    def read_into(
        self, version: ObjectVersion, offset: int, into: memoryview, received: OnReceived = ignore_received
    ) -> None:
        """Send one ranged GET, and check that the answer is of that version. From a server without ranges the bytes before
        are received in vain, up to `max_skipped_bytes`."""
        if not len(into):
            return
        headers = {}
        if len(into) < version.size_bytes:
            headers["Range"] = f"bytes={offset}-{offset + len(into) - 1}"
        if version.etag and is_strong_tag(version.etag) and " " not in version.etag:
            headers["If-Match"] = f'"{version.etag}"'
        with self._client.follow(version.uri, headers) as (response, connection):
            if response.status not in (200, 206):
                connection.read_error(response)
                raise refusal(version.uri, response)
            check_no_page(version.uri, response.headers)
            check_encoding(version.uri, encoding_of(response.headers))
            response.headers["etag"] = _tag(response)
            if response.status == 200 and headers.get("Range"):
                return self._read_behind(version, offset, into, received, response, connection)
            receive(version, offset, into, received, response, connection, self._repeated)

    def close(self) -> None:
        """Close every connection."""
        self._client.close()

    def _read_behind(
        self,
        version: ObjectVersion,
        offset: int,
        into: memoryview,
        received: OnReceived,
        response: Response,
        connection: HttpConnection,
    ) -> None:
        """Read a range of a response that has the whole file."""
        if response.length != version.size_bytes or not same_tag(response.headers["etag"], version.etag):
            raise SourceChanged(
                f"{version.uri} is no longer the version that was found; open the dataset again"
            )
        if offset > self._max_skipped_bytes or response.chunked:
            raise InvalidInput(
                f"{version.uri}: its server serves no byte ranges, which a file of {version.size_bytes:,} bytes needs; "
                "use another server, or copy the file"
            )
        scrap = memoryview(bytearray(min(_SKIP_BYTES, offset)))
        left = offset
        while left:
            connection.read_into(scrap[:left])
            left -= min(left, len(scrap))
        connection.read_into(into, received)


def _tag(response: Response) -> str:
    return response.headers.get("etag") or response.headers.get("last-modified", "")
