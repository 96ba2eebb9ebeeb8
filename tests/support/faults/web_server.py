"""A web server of files with habits of a test's choice, and a stand-in for Hugging Face's hub and its storage."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

_RANGE = re.compile(r"bytes=(\d+)-(\d+)")
HUB_PAGE = 3


@dataclass
class WebServer:
    """`files` by path. `ranges`: whether it serves ranges. `tags`: whether it states entity tags. `refuse`: statuses of the
    next requests; 200 answers with a web page. `redirects`: targets by path. `encoding`: the
    Content-Encoding that files are stored in."""

    files: dict[str, bytes] = field(default_factory=dict)
    ranges: bool = True
    tags: bool = True
    refuse: list[int] = field(default_factory=list)
    redirects: dict[str, str] = field(default_factory=dict)
    encoding: str = ""
    seen: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    """Path with query, and headers, of each request."""
    url: str = ""
    storage_url: str = ""

    def answer(self, path: str, query: dict[str, list[str]], headers: dict[str, str]) -> Any:
        """Return (status, headers, body)."""
        if self.refuse:
            return self.refusal(self.refuse.pop(0))
        if path in self.redirects:
            return 302, {"Location": self.redirects[path]}, b"moved"
        if path not in self.files:
            return 404, {}, b"absent"
        return self.file(self.files[path], headers)

    def refusal(self, status: int) -> Any:
        """Return (status, headers, body) without the file; 200 is a proxy's web page."""
        return status, {"Content-Type": "text/html"}, b"<html>one moment</html>" if status == 200 else b""

    def file(self, body: bytes, headers: dict[str, str]) -> Any:
        told = {"ETag": f'"{hashlib.md5(body).hexdigest()}"'} if self.tags else {}
        told |= {"Content-Encoding": self.encoding} if self.encoding else {}
        told |= {"Last-Modified": f"Mon, 01 Jan 2026 00:00:{len(body) % 60:02} GMT"}
        if headers.get("If-Match", told.get("ETag")) != told.get("ETag"):
            return 412, told, b""
        asked = _RANGE.fullmatch(headers.get("Range", ""))
        if asked is None or not self.ranges:
            return 200, told, body
        first, last = int(asked[1]), min(int(asked[2]), len(body) - 1)
        if first >= len(body):
            return 416, {**told, "Content-Range": f"bytes */{len(body)}"}, b""
        return 206, {**told, "Content-Range": f"bytes {first}-{last}/{len(body)}"}, body[first : last + 1]


@dataclass
class Hub(WebServer):
    """Serves `files` as the dataset `owner/name` at the revision `sha`. LFS objects are redirected to signed URLs of
    its storage, each valid for `uses` requests."""

    sha: str = "a" * 40
    uses: int = 1_000_000
    token: str = ""
    lfs: frozenset[str] = frozenset()
    corrupt: bool = False
    signed: dict[str, int] = field(default_factory=dict)

    def oid(self, path: str) -> str:
        body = self.files[path]
        return (
            hashlib.sha256(body).hexdigest() if path in self.lfs else hashlib.sha1(b"blob" + body).hexdigest()
        )

    def answer(self, path: str, query: dict[str, list[str]], headers: dict[str, str]) -> Any:
        if self.refuse:
            return self.refusal(self.refuse.pop(0))
        if path.startswith("/cdn/"):
            assert "Authorization" not in headers, "a signed URL must not get the token"
            ticket = query["ticket"][0]
            if self.signed.get(ticket, 0) <= 0:
                return 403, {}, b"expired"
            self.signed[ticket] -= 1
            body = self.files[path.removeprefix("/cdn/")]
            return self.file(body[:-1] + bytes([body[-1] ^ 1]) if self.corrupt else body, headers)
        if self.token and headers.get("Authorization") != f"Bearer {self.token}":
            return 401, {}, b""
        api = re.fullmatch(r"/api/datasets/owner/name/(revision|tree)/([^/]+)/?(.*)", path)
        if api is not None:
            return self._api(api[1], api[2], api[3], query)
        found = re.fullmatch(rf"/datasets/owner/name/resolve/{self.sha}/(.*)", path)
        if found is None or found[1] not in self.files:
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        told = {"X-Repo-Commit": self.sha}
        if found[1] not in self.lfs:
            status, more, body = self.file(self.files[found[1]], headers)
            return status, {**more, **told, "ETag": f'"{self.oid(found[1])}"'}, body
        ticket = str(len(self.signed))
        self.signed[ticket] = self.uses
        told |= {"X-Linked-Etag": f'"{self.oid(found[1])}"', "X-Linked-Size": str(len(self.files[found[1]]))}
        return 302, {**told, "Location": f"{self.storage_url}/cdn/{found[1]}?ticket={ticket}"}, b""

    def _api(self, kind: str, revision: str, below: str, query: dict[str, list[str]]) -> Any:
        if revision not in ("main", self.sha):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        if kind == "revision":
            return 200, {}, json.dumps({"sha": self.sha, "siblings": []}).encode()
        paths = sorted(path for path in self.files if not below or path.startswith(below + "/"))
        if not paths:
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        first = int(query.get("cursor", ["0"])[0])
        rows: list[dict[str, Any]] = [{"type": "directory", "path": "d", "size": 0, "oid": "0" * 40}]
        for path in paths[first : first + HUB_PAGE]:
            row: dict[str, Any] = {
                "type": "file",
                "path": path,
                "size": len(self.files[path]),
                "oid": self.oid(path),
            }
            if path in self.lfs:
                row |= {
                    "oid": "1" * 40,
                    "lfs": {"oid": self.oid(path), "size": row["size"], "pointerSize": 130},
                }
            rows.append(row)
        told = {}
        if first + HUB_PAGE < len(paths):
            link = f"{self.url}/api/datasets/owner/name/tree/{revision}/{below}?recursive=true&cursor={first + HUB_PAGE}"
            told["Link"] = f'<{link}>; rel="next"'
        return 200, told, json.dumps(rows).encode()


@contextmanager
def serving(server: WebServer) -> Iterator[None]:
    """Serve on two free loopback ports, which `server.url` and `server.storage_url` name."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            url, headers = urlsplit(self.path), dict(self.headers.items())
            server.seen.append((self.path, headers))
            status, told, body = server.answer(unquote(url.path), parse_qs(url.query), headers)
            self.send_response(status)
            for name, value in {**told, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            with suppress(ConnectionError):
                self.wfile.write(body)

    made = [ThreadingHTTPServer(("127.0.0.1", 0), Handler) for _ in range(2)]
    server.url, server.storage_url = (f"http://127.0.0.1:{each.server_port}" for each in made)
    threads = [threading.Thread(target=each.serve_forever, args=(0.05,)) for each in made]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for each, thread in zip(made, threads, strict=True):
            each.shutdown()
            each.server_close()
            thread.join()
