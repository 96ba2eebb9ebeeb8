"""Forward proxies that the environment names in HTTP_PROXY, HTTPS_PROXY and NO_PROXY, in either case.

boto3 uses the same variables for its own requests (LIST, HEAD).
"""

from __future__ import annotations

import base64
import socket
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from cachesvc.core.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class Proxy:
    """A proxy's address. `authorization`: the header line that it requires, or empty."""

    host: str
    port: int
    authorization: str = field(default="", repr=False)

    @property
    def name(self) -> str:
        """The name in errors, without the password."""
        return f"the proxy {self.host}:{self.port}"

    def connect(self, timeout_s: float) -> socket.socket:
        """Connect to the proxy itself. Raises OSError."""
        return socket.create_connection((self.host, self.port), timeout_s)

    def tunnel(self, host: str, port: int) -> bytes:
        """Return the head of a CONNECT request. After a 2xx response the connection leads to the server (RFC 9110,
        9.3.6)."""
        name = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        lines = [f"CONNECT {name} HTTP/1.1", f"Host: {name}", *filter(None, [self.authorization])]
        return ("\r\n".join(lines) + "\r\n\r\n").encode()


def proxy_of(url: str) -> Proxy | None:
    """Return the proxy that the environment names for a URL; None for a direct connection. Raises InvalidInput for kinds of
    proxy other than plain HTTP."""
    parts = urlsplit(url)
    found = "" if proxy_bypass(parts.netloc) else getproxies().get(parts.scheme, "")
    if not found:
        return None
    proxy = urlsplit(found if "://" in found else f"http://{found}")
    try:
        port = proxy.port or 80
    except ValueError:
        port = 0
    if proxy.scheme != "http" or not proxy.hostname or not port:
        raise InvalidInput(
            f"{parts.scheme.upper()}_PROXY names no HTTP proxy; write http://HOST:PORT, or name the S3 server in NO_PROXY"
        )
    authorization = ""
    if proxy.username is not None:
        pair = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
        authorization = f"Proxy-Authorization: Basic {base64.b64encode(pair.encode()).decode()}"
    return Proxy(proxy.hostname, port, authorization)
