"""Answers requests for the status page.

Only this machine is answered. A web page elsewhere can make a browser on this machine send requests here, under a name that
it resolves to 127.0.0.1 (DNS rebinding). So the `Host` header must be an address, `localhost` or this host's name. The page
may load nothing but its data: its `Content-Security-Policy` names the digests of its own script and style.
"""

from __future__ import annotations

import base64
import hashlib
import ipaddress
import json
import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from urllib.parse import urlsplit

from cachesvc.v1 import cachesvc_pb2 as pb
from cachesvc.v1.plain import plain

HTML = Path(__file__).with_name("status.html")
FRESH_S = 1.0
"""The age up to which a snapshot is sent again."""
LOAD = 10
"""Snapshots take at most one part in so many of the time: one of a million extents takes seconds."""
PAGE, DATA = "/", "/status.json"


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a request."""

    status: HTTPStatus
    content_type: str
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)


class Page:
    """`read` returns the status that any user may see. Safe from any thread."""

    def __init__(self, read: Callable[[], pb.StatusReply], address: str) -> None:
        """`address`: HOST:PORT of the server."""
        self._read = read
        self._names = {"localhost", os.uname().nodename.lower(), _host_of(address)}
        self._html = HTML.read_bytes()
        self._headers = {
            "Content-Security-Policy": policy(self._html.decode()),
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cache-Control": "no-store",
        }
        self._lock = threading.Lock()
        self._data, self._fresh_until = b"", 0.0

    def answer(self, path: str, host: str, client: str) -> Answer | None:
        """Return the answer to a request for `path` by the address `client`, whose `Host` header is `host`; None for a path
        of others."""
        if path not in (PAGE, DATA):
            return None
        if not _is_loopback(client):
            return self._refusal("the status page is for this machine: ssh -L 9464:127.0.0.1:9464 to it")
        if not self._knows(host):
            return self._refusal("open the status page as localhost, or by this host's name or address")
        if path == PAGE:
            return Answer(HTTPStatus.OK, "text/html; charset=utf-8", self._html, self._headers)
        return Answer(HTTPStatus.OK, "application/json", self._status(), self._headers)

    def _refusal(self, text: str) -> Answer:
        return Answer(HTTPStatus.FORBIDDEN, "text/plain; charset=utf-8", f"{text}\n".encode(), self._headers)

    def _knows(self, host: str) -> bool:
        name = _host_of(host)
        try:
            ipaddress.ip_address(name.partition("%")[0])
        except ValueError:
            return name in self._names
        return True

    def _status(self) -> bytes:
        with self._lock:
            began = time.monotonic()
            if began >= self._fresh_until:
                self._data = json.dumps(plain(self._read())).encode()
                now = time.monotonic()
                self._fresh_until = now + max(FRESH_S, LOAD * (now - began))
            return self._data


def policy(html: str) -> str:
    """Return the Content-Security-Policy of a page with inline scripts and styles."""

    def digests(tag: str) -> str:
        found = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.S)
        return " ".join(
            f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in found
        )

    return (
        f"default-src 'none'; script-src {digests('script')}; style-src {digests('style')}; connect-src 'self';"
        " img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _host_of(address: str) -> str:
    """Return the name or address in HOST:PORT; "" where there is none."""
    try:
        return (urlsplit(f"//{address}").hostname or "").lower()
    except ValueError:
        return ""


def _is_loopback(client: str) -> bool:
    address = ipaddress.ip_address(client.partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
