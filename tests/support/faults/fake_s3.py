"""A fake S3 server that says whatever a test wants: objects of any size from a pattern, listings in pages, refusals."""

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
    """Bytes [offset, offset + size) of a series in which each 8-byte word tells where it is."""
    first = offset // 8
    words = np.arange(first, (offset + size + 7) // 8, dtype="<u8") * np.uint64(0x9E3779B97F4A7C15)
    return words.tobytes()[offset - first * 8 :][:size]


@dataclass
class Object:
    """What a GET answers: bytes, or `pattern` up to `size`."""

    size: int
    etag: str = "0" * 31 + "1-7"
    data: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)
    parts: list[int] = field(default_factory=list)
    """Bytes of each, of an object that was uploaded in them."""
    sums: list[str] = field(default_factory=list)
    """The CRC-32 that is stated of each part."""

    def span(self, first: int, last: int) -> bytes:
        if self.data is not None:
            return self.data[first : last + 1]
        return pattern(first, last - first + 1)


@dataclass
class FakeS3:
    """`refuse(handler)` may answer (status, code) before anything else, and adds `more_said`; bodies come `in_chunks`, as
    AWS sends its errors and some gateways everything;
    `before_page(number)` runs before a page of a listing is made; `more_rows` are added to each, and one that is `stuck`
    gives the same token again."""

    objects: dict[str, Object] = field(default_factory=dict)
    refuse: Callable[[BaseHTTPRequestHandler], tuple[int, str] | None] = lambda handler: None
    before_page: Callable[[int], None] = lambda number: None
    more_said: str = ""
    tag: Callable[[str, str], str] = lambda where, etag: f'"{etag}"'
    """How a tag is written in a "LIST", "HEAD" or "GET"; If-Match must be the same to the letter, as RFC 9110 says."""
    decodes: Callable[[BaseHTTPRequestHandler], bool] | None = None
    """Whether an answer is decoded on the way, where objects are stored with `Content-Encoding: gzip`; without a length and
    without a thought for ranges then, as Google's is."""
    names_encoding: bool = False
    """In a header of its own, as Google does, also of what is decoded."""
    listing: str = ""
    """What is answered instead of any listing."""
    version_1: bool = False
    """Listings are of version 1, whatever was asked for."""
    more_rows: str = ""
    stuck: bool = False
    in_chunks: bool = False
    asked: list[str] = field(default_factory=list)
    """"LIST", "HEAD" or "GET", of each request."""
    ranges: list[str] = field(default_factory=list)
    """Of objects, as they were read; of parts too: "bytes=0-99"."""
    requests: int = 0
    endpoint: str = ""


@contextmanager
def fake_s3() -> Iterator[FakeS3]:
    """Serves on a free loopback port; the bucket is the first segment, and any."""
    fake = FakeS3()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

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
            number = int(parse_qs(url.query).get("partNumber", ["0"])[0])
            if self.headers.get("x-amz-checksum-mode") == "ENABLED":
                of_parts = {"x-amz-checksum-crc32": found.sums[number - 1]} if number and found.sums else {}
                headers |= of_parts if number else found.headers
            asked = _RANGE.fullmatch(self.headers.get("Range", ""))
            if number and found.parts:
                first = sum(found.parts[: number - 1])
                last = first + found.parts[number - 1] - 1
                if self.command == "GET":
                    fake.ranges.append(f"bytes={first}-{last}")
                headers["Content-Range"] = f"bytes {first}-{last}/{found.size}"
                return self._send(206, found.span(first, last), headers)
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
                with suppress(ConnectionError):  # what is not as it was asked for is not read to its end
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
    following = "stuck|" if fake.stuck else f"{int(number or 0) + 1}|{escape(page[-1])}"
    token = (
        ""
        if fake.version_1
        else f"<NextContinuationToken>{following}</NextContinuationToken>"
        if more
        else ""
    )
    body = f"<IsTruncated>{str(more).lower()}</IsTruncated>{token}{rows}{fake.more_rows}"
    return f"<ListBucketResult>{body}</ListBucketResult>".encode()
