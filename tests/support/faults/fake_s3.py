"""A fake S3 server with responses of a test's choice: objects of any size from a pattern, listings in pages, refusals."""

from __future__ import annotations

import gzip
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import numpy as np

PAGE = 1000
_RANGE = re.compile(r"bytes=(\d+)-(\d+)")


def pattern(offset: int, size: int) -> bytes:
    """Return bytes [offset, offset + size) of a series in which each 8-byte word encodes its position."""
    first = offset // 8
    words = np.arange(first, (offset + size + 7) // 8, dtype="<u8") * np.uint64(0x9E3779B97F4A7C15)
    return words.tobytes()[offset - first * 8 :][:size]


@dataclass
class Object:
    """An object: its bytes, or `pattern` up to `size`."""

    size: int
    etag: str = "0" * 31 + "1-7"
    data: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def span(self, first: int, last: int) -> bytes:
        if self.data is not None:
            return self.data[first : last + 1]
        return pattern(first, last - first + 1)


@dataclass
class FakeS3:
    """The server's objects and behaviour.

    `refuse(handler)` may return (status, code), which is the response, with `more_said` in its body.
    `before_page(number)` runs before a page of a listing is made. `more_rows` are added to each page; a `stuck` listing
    repeats its token. `in_chunks`: bodies are chunked, as AWS's errors and all bodies of some gateways are.
    """

    objects: dict[str, Object] = field(default_factory=dict)
    refuse: Callable[[BaseHTTPRequestHandler], tuple[int, str] | None] = lambda handler: None
    before_page: Callable[[int], None] = lambda number: None
    more_said: str = ""
    tag: Callable[[str, str], str] = lambda where, etag: f'"{etag}"'
    """Writes a tag for a "LIST", "HEAD" or "GET". If-Match must equal it to the letter (RFC 9110)."""
    decodes: Callable[[BaseHTTPRequestHandler], bool] | None = None
    """Tells whether a response is decoded on the way. Objects are then stored with `Content-Encoding: gzip`, and a decoded
    response has no length and ignores ranges, like Google's."""
    names_encoding: bool = False
    """Whether all responses name the stored encoding in a header of its own, like Google's."""
    listing: str = ""
    """The response to every LIST, in place of a listing."""
    version_1: bool = False
    """Whether all listings are of version 1."""
    more_rows: str = ""
    stuck: bool = False
    in_chunks: bool = False
    asked: list[str] = field(default_factory=list)
    """"LIST", "HEAD" or "GET" for each request."""
    ranges: list[str] = field(default_factory=list)
    """Ranges of objects in the order of their reads: "bytes=0-99"."""
    sent_bytes: int = 0
    """Bytes of objects in all bodies."""
    requests: int = 0
    endpoint: str = ""


@contextmanager
def fake_s3() -> Iterator[FakeS3]:
    """Serve on a free loopback port. The first segment of a path is the bucket; every bucket exists."""
    fake = FakeS3()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def handle(self) -> None:
            with suppress(ConnectionError):  # the client left a response unread
                super().handle()

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            fake.requests += 1
            url = urlsplit(self.path)
            _, _, key = url.path.lstrip("/").partition("/")
            listed = not key
            fake.asked.append("LIST" if listed else self.command)
            refused = fake.refuse(self)
            if refused is not None:
                said = f"<Code>{refused[1]}</Code>{fake.more_said}"
                return self._send(refused[0], f"<Error>{said}</Error>".encode())
            if listed:
                return self._send(200, fake.listing.encode() or _listing(fake, parse_qs(url.query)))
            found = fake.objects.get(unquote(key))
            if found is None:
                return self._send(404, b"<Error><Code>NoSuchKey</Code></Error>")
            headers = {"ETag": fake.tag(self.command, found.etag)}
            if self.headers.get("If-Match", headers["ETag"]) != headers["ETag"]:
                return self._send(412, b"<Error><Code>PreconditionFailed</Code></Error>")
            if fake.decodes is not None:
                if fake.names_encoding:
                    headers["x-goog-stored-content-encoding"] = "gzip"
                if fake.decodes(self):
                    return self._send(200, gzip.decompress(found.span(0, found.size - 1)), headers, True)
                headers["Content-Encoding"] = "gzip"
            if self.headers.get("x-amz-checksum-mode") == "ENABLED":
                headers |= found.headers
            asked = _RANGE.fullmatch(self.headers.get("Range", ""))
            if self.command == "GET":
                fake.sent_bytes += int(asked[2]) - int(asked[1]) + 1 if asked else found.size
            if asked is None:
                return self._send(200, found.span(0, found.size - 1), headers)
            first, last = int(asked[1]), int(asked[2])
            fake.ranges.append(asked[0])
            headers["Content-Range"] = f"bytes {first}-{last}/{found.size}"
            self._send(206, found.span(first, last), headers)

        def _send(
            self, status: int, body: bytes, headers: dict[str, str] | None = None, in_chunks: bool = False
        ) -> None:
            self.send_response(status)
            length = {"Content-Length": str(len(body))}
            if (fake.in_chunks or in_chunks) and body and self.command != "HEAD":
                length = {"Transfer-Encoding": "chunked"}
                parts = [part for part in (body[:9], body[9:70_000], body[70_000:]) if part]
                body = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (*parts, b""))
            length = {} if in_chunks and self.command == "HEAD" else length
            for name, value in {**(headers or {}), **length}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                with suppress(ConnectionError):  # the client stops reading a wrong response
                    self.wfile.write(body)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        fake.endpoint = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield fake
        finally:
            server.shutdown()
            thread.join()


def _listing(fake: FakeS3, query: dict[str, list[str]]) -> bytes:
    prefix, after = query.get("prefix", [""])[0], query.get("continuation-token", [""])[0]
    if fake.version_1:
        after = f"|{query['marker'][0]}" if "marker" in query else ""
    number, _, last = after.partition("|")
    fake.before_page(int(number) if number.isdigit() else 0)
    size = int(query.get("max-keys", [str(PAGE)])[0])
    keys = sorted(key for key in list(fake.objects) if key.startswith(prefix) and (not after or key > last))
    page = keys[:size]
    rows = "".join(
        f"<Contents><Key>{escape(key)}</Key><Size>{fake.objects[key].size}</Size>"
        f"<ETag>{escape(fake.tag('LIST', fake.objects[key].etag), {chr(34): '&quot;'})}</ETag>"
        "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
        for key in page
    )
    more = len(keys) > size or fake.stuck
    following = "stuck|" if fake.stuck else f"{int(number or 0) + 1}|{escape(page[-1]) if page else ''}"
    token = (
        ""
        if fake.version_1
        else f"<NextContinuationToken>{following}</NextContinuationToken>"
        if more
        else ""
    )
    body = f"<IsTruncated>{str(more).lower()}</IsTruncated>{token}{rows}{fake.more_rows}"
    return f"<ListBucketResult>{body}</ListBucketResult>".encode()
