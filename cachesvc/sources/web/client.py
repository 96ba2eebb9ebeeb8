"""GETs of URLs over kept connections, with redirects followed or returned."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from ipaddress import ip_address
from urllib.parse import quote, urljoin, urlsplit

from cachesvc.core.errors import (
    CacheError,
    CorruptData,
    InvalidInput,
    NotAllowed,
    NotFound,
    SourceChanged,
    SourceUnavailable,
)
from cachesvc.core.model import ObjectVersion
from cachesvc.sources.s3.http import (
    ConnectionPool,
    HttpConnection,
    Response,
    UnexpectedResponse,
    retry_after_s,
)
from cachesvc.sources.s3.proxies import Proxy, proxy_of
from cachesvc.sources.s3.responses import OtherVersion, RepeatedFaults, receive_body, verify
from cachesvc.sources.source import OnReceived

REDIRECTS = frozenset({301, 302, 303, 307, 308})
MAX_REDIRECTS = 5
_THROTTLED = frozenset({429, 503})
_SAFE = "/%:@!$&'()*+,;=~?-._"


class WebClient:
    """Connections to any number of servers, by host. Thread-safe."""

    def __init__(self) -> None:
        self._pools: dict[tuple[str, str], tuple[ConnectionPool, Proxy | None]] = {}
        self._lock = threading.Lock()

    @contextmanager
    def get(self, url: str, headers: Mapping[str, str]) -> Iterator[tuple[Response, HttpConnection]]:
        """Send one GET; yields the response's head and the connection, from which the body may be read. Raises
        SourceUnavailable, NotAllowed for an untrusted certificate, InvalidInput for what is no URL of a web server."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
            raise InvalidInput(f"{url} is no http:// or https:// URL without a user and password")
        port = parts.port or (443 if parts.scheme == "https" else 80)
        pool, proxy = self._pool(parts.scheme, parts.netloc)
        request = _head(url, parts.netloc, headers, proxy if parts.scheme == "http" else None)
        with pool.request(parts.hostname, port, request) as answer:
            yield answer

    @contextmanager
    def follow(self, url: str, headers: Mapping[str, str]) -> Iterator[tuple[Response, HttpConnection]]:
        """Send a GET, and follow redirects. Raises as `get`, and InvalidInput for redirects without end."""
        here = url
        for _ in range(MAX_REDIRECTS):
            with self.get(here, headers) as (response, connection):
                if response.status not in REDIRECTS:
                    yield response, connection
                    return
                connection.read_error(response)
                here = redirected(here, response)
        raise InvalidInput(f"{url} redirects without an end; give the URL that has the data")

    def close(self) -> None:
        """Close every connection."""
        for pool, _ in self._pools.values():
            pool.close()

    def _pool(self, scheme: str, host: str) -> tuple[ConnectionPool, Proxy | None]:
        with self._lock:
            if (scheme, host) not in self._pools:
                proxy = proxy_of(f"{scheme}://{host}")
                tls = ssl.create_default_context() if scheme == "https" else None
                self._pools[scheme, host] = ConnectionPool(tls, proxy), proxy
            return self._pools[scheme, host]


def redirected(url: str, response: Response) -> str:
    """Return the target of a redirect: on the same host, or anywhere by TLS. Raises SourceUnavailable for none, NotAllowed
    for any other target: an allowed host must not lead to services of this network, such as a cloud's metadata."""
    location = response.headers.get("location", "")
    if not location:
        raise SourceUnavailable(f"{url}: the server redirects it to nowhere ({response.status})")
    there = urljoin(url, location)
    before, after = urlsplit(url), urlsplit(there)
    same_host = after.hostname == before.hostname and after.scheme in (before.scheme, "https")
    if not same_host and (after.scheme != "https" or is_address(after.hostname or "")):
        raise NotAllowed(f"{url} redirects to another host without TLS, {after.scheme}://{after.netloc}")
    return there


def is_address(host: str) -> bool:
    """Tell whether a host is an IP address, perhaps in brackets."""
    try:
        ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


def refusal(uri: str, response: Response) -> CacheError:
    """Return the error for a response that is neither 200 nor 206."""
    status = response.status
    if status in (404, 410):
        return NotFound(f"{uri}: no such file ({status})")
    if status in (401, 403, 407, 451):
        return NotAllowed(f"{uri}: access refused ({status})")
    if status in (412, 416):
        return SourceChanged(
            f"{uri} is no longer the version that was found ({status}); open the dataset again"
        )
    if status < 500 and status != 429 and status != 408:
        return InvalidInput(f"{uri}: the server does not answer this request with a file ({status})")
    error = SourceUnavailable(f"{uri}: the server answered {status}")
    error.throttled = status in _THROTTLED
    error.retry_after_s = retry_after_s(response.headers)
    return error


def _head(url: str, host: str, headers: Mapping[str, str], proxy: Proxy | None) -> bytes:
    parts = urlsplit(url)
    target = quote(parts.path or "/", safe=_SAFE) + (
        f"?{quote(parts.query, safe=_SAFE)}" if parts.query else ""
    )
    lines = [
        f"GET {target if proxy is None else f'{parts.scheme}://{host}{target}'} HTTP/1.1",
        f"Host: {host}",
    ]
    if proxy is not None and proxy.authorization:
        lines.append(proxy.authorization)
    lines += [f"{name}: {value}" for name, value in {"Accept-Encoding": "identity", **headers}.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1", "replace")


def receive(
    version: ObjectVersion,
    offset: int,
    into: memoryview,
    received: OnReceived,
    response: Response,
    connection: HttpConnection,
    repeated: RepeatedFaults,
) -> None:
    """Check the head of a response, and receive its body. Raises SourceChanged for another version, UnexpectedResponse for
    a wrong response, and CorruptData where `repeated` knows the one before as wrong, too."""
    try:
        verify(version, offset, len(into), response)
    except OtherVersion as error:
        raise SourceChanged(f"{error}; open the dataset again") from error
    except UnexpectedResponse as error:
        if repeated.failed(version.uri, offset):
            raise CorruptData(f"{error}, twice") from error
        raise
    receive_body(connection, response, into, received)
    repeated.succeeded(version.uri, offset)
