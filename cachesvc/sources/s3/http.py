"""HTTP/1.1 GETs and HEADs over kept connections, received straight into the caller's memory.

It has only what ranged reads of objects need: a response head, then a body of known length. A body on a plain socket is one
system call without the interpreter lock. Libraries take 1.2 to 3 times the CPU for 8 MiB (measured in
docs/decisions/2026-11-26-http-client.md).
"""

from __future__ import annotations

import re
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import partial
from typing import TypeVar

from cachesvc.core.errors import CacheError, NotAllowed, SourceUnavailable, translating
from cachesvc.core.limits import BODY_S, CONNECT_S, RECEIVE_S, RETRY_AFTER_CAP_S, SILENCE_S
from cachesvc.sources.s3.proxies import Proxy
from cachesvc.sources.source import OnReceived, ignore_received

MAX_HEAD_BYTES = 64 << 10
MAX_ERROR_BODY_BYTES = 64 << 10
IDLE_CONNECTIONS = 128
_RECV_BYTES = 4096
_STEP_BYTES = 1 << 20
"""Bytes of a body after which the caller is told that they came."""
_T = TypeVar("_T")
_NUMBER = re.compile("[0-9]{1,18}")
_HEX = re.compile(b"[0-9a-fA-F]{1,15}")


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Limits of a connection: of silence, of one receive without TLS, and of a whole head or body."""

    silence_s: float = SILENCE_S
    receive_s: float = RECEIVE_S
    body_s: float = BODY_S


class ConnectionClosed(SourceUnavailable):
    """The server closed the connection before it sent a byte: a kept connection had gone stale."""


class UnexpectedResponse(SourceUnavailable):
    """A response of another form or length than was requested."""


@dataclass(frozen=True, slots=True)
class Response:
    """A response head; header names in lower case. `length`: of the body, None if the server does not state it. A `chunked`
    body states its end itself."""

    status: int
    headers: dict[str, str]
    length: int | None
    chunked: bool


class HttpConnection:
    """One socket. After `request` the caller must read the body or close the connection."""

    def __init__(self, sock: socket.socket, name: str, timeouts: Timeouts | None = None) -> None:
        self._sock, self._name, self._timeouts = sock, name, timeouts or Timeouts()
        self._plain = not isinstance(sock, ssl.SSLSocket)
        self._buffered = b""
        self._remaining = 0
        self._keep_alive = True
        self._chunked = False
        self.reused = False
        self.interrupted = False
        self.received_bytes = 0
        """Bytes of all bodies received here."""

    def request(self, head: bytes) -> Response:
        """Send a request, receive the response's head. Raises SourceUnavailable; ConnectionClosed when no byte came
        back."""
        self._remaining = 1  # no other request until a whole response has been read
        with translating(OSError, self._unavailable):
            try:
                self._sock.sendall(head)
                received = self._receive_until(b"\r\n\r\n")
            except (BrokenPipeError, ConnectionResetError) as error:
                raise ConnectionClosed(f"{self._name} closed the connection") from error
        response = self._parse(received)
        if head.startswith(b"HEAD "):
            self._remaining, self._chunked = 0, False
        return response

    def read_into(self, into: memoryview, received: OnReceived = ignore_received) -> None:
        """Fill `into` with the next bytes of the body, or with all of a chunked body; tell `received` how many have come.

        Raises SourceUnavailable for a body that ends early, UnexpectedResponse for a complete chunked body of another
        length."""
        received(0)
        if not self._chunked:
            return self._read(into, received)
        done = 0
        try:
            with translating(OSError, self._unavailable):
                for size in self._chunk_sizes():
                    if size > len(into) - done:
                        raise UnexpectedResponse(
                            f"{self._name} sent more than the {len(into)} bytes asked for"
                        )
                    self._read(into[done : done + size])
                    done += size
                    received(done)
        except (ValueError, ConnectionClosed) as error:
            raise SourceUnavailable(f"{self._name} cut the response, or sent malformed chunks") from error
        if done < len(into):
            self._keep_alive = False
            raise UnexpectedResponse(f"{self._name} ended the response after {done} of {len(into)} bytes")

    def _read(self, into: memoryview, received: OnReceived = ignore_received) -> None:
        done = min(len(self._buffered), len(into))
        into[:done] = self._buffered[:done]
        self._buffered = self._buffered[done:]
        self.received_bytes += done
        flags = socket.MSG_WAITALL if self._plain else 0
        until = time.monotonic() + self._timeouts.body_s
        while done < len(into):
            if time.monotonic() > until:
                raise SourceUnavailable(
                    f"{self._name} sent {done} of {len(into)} bytes in {self._timeouts.body_s:.0f} s: too slow"
                )
            try:
                got = self._retried(partial(self._sock.recv_into, into[done : done + _STEP_BYTES], 0, flags))
            except OSError as error:
                raise self._unavailable(error) from error
            if not got:
                raise SourceUnavailable(f"{self._name} cut the response after {done} of {len(into)} bytes")
            done += got
            self.received_bytes += got
            received(done)
        self._remaining -= done

    def read_error(self, response: Response) -> bytes:
        """Return the body of an error response; empty, and no reuse, when it is long, malformed or of unknown length."""
        try:
            return self.read_body(response, MAX_ERROR_BODY_BYTES)
        except UnexpectedResponse:
            return b""

    def read_body(self, response: Response, limit_bytes: int) -> bytes:
        """Return a whole body. Raises SourceUnavailable, and UnexpectedResponse for one that is longer than the limit,
        malformed or of unknown length."""
        body = bytearray()
        malformed = f"{self._name} sent malformed chunks"
        with (
            translating(OSError, self._unavailable),
            translating(ValueError, lambda _: UnexpectedResponse(malformed)),
        ):
            for size in self._chunk_sizes() if self._chunked else [response.length]:
                if size is None or size > limit_bytes - len(body):
                    raise UnexpectedResponse(
                        f"{self._name} sent an answer of more than {limit_bytes:,} bytes"
                    )
                part = bytearray(size)
                self._read(memoryview(part))
                body += part
        return bytes(body)

    @property
    def clean(self) -> bool:
        """True if the connection can be reused."""
        return self._keep_alive and not (self._remaining or self._buffered or self.interrupted)

    def interrupt(self) -> None:
        """Make a read that runs in another thread fail now."""
        self.interrupted = True
        try:
            # SSLSocket.shutdown would leave the reader a plain socket, which takes encrypted bytes for the body.
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)
        except OSError:  # the server has closed it already
            pass

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()

    def _chunk_sizes(self) -> Iterator[int]:
        """Yield the size of each chunk in bytes; the caller reads the chunk before it takes the next size. After the last
        one the connection can be reused. Raises ValueError for a malformed body."""
        keep, self._keep_alive, until = self._keep_alive, False, time.monotonic() + self._timeouts.body_s
        while size := self._chunk_size():
            if time.monotonic() > until:
                raise SourceUnavailable(
                    f"{self._name} sent no whole body in {self._timeouts.body_s:.0f} s: too slow"
                )
            yield size
            if self._receive_until(b"\r\n"):
                raise ValueError("a chunk longer than its stated size")
        self._keep_alive = keep and not self._receive_until(b"\r\n")
        self._remaining = 0

    def _chunk_size(self) -> int:
        size = self._receive_until(b"\r\n").partition(b";")[0].strip()
        if not _HEX.fullmatch(size):
            raise ValueError(size)
        return int(size, 16)

    def _receive_until(self, mark: bytes) -> bytes:
        """Receive up to a mark in a head or between chunks; return the bytes before the mark."""
        received, until = self._buffered, time.monotonic() + self._timeouts.body_s
        while (end := received.find(mark)) < 0:
            if len(received) > MAX_HEAD_BYTES:
                raise SourceUnavailable(f"{self._name} sent a response head above {MAX_HEAD_BYTES} bytes")
            if received and time.monotonic() > until:
                raise SourceUnavailable(
                    f"{self._name} sent no whole head in {self._timeouts.body_s:.0f} s: too slow"
                )
            got = self._retried(partial(self._sock.recv, _RECV_BYTES))
            if not got:
                raise ConnectionClosed(f"{self._name} closed the connection")
            received += got
        self._buffered = received[end + len(mark) :]
        return received[:end]

    def _parse(self, head: bytes) -> Response:
        lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (x.partition(":") for x in lines[1:])}
        version, _, rest = lines[0].partition(" ")
        status, length = parse_number(rest[:3]), parse_number(headers.get("content-length", ""))
        if not version.startswith("HTTP/1.") or status is None:
            raise SourceUnavailable(f"{self._name} does not speak HTTP/1.1")
        self._keep_alive = headers.get("connection", "").lower() != "close" and version == "HTTP/1.1"
        self._chunked = headers.get("transfer-encoding", "").lower() == "chunked"
        length = None if "transfer-encoding" in headers else length
        self._remaining = 1 if length is None else length
        return Response(status, headers, length, self._chunked)

    def _retried(self, receive: Callable[[], _T]) -> _T:
        """Call `receive` until it returns, or has timed out for `silence_s`. Raises OSError."""
        until = time.monotonic() + self._timeouts.silence_s
        while True:
            try:
                return receive()
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise

    def _unavailable(self, error: OSError) -> SourceUnavailable:
        late = isinstance(error, TimeoutError | BlockingIOError)
        waited_s = self._sock.gettimeout() or self._timeouts.silence_s
        what = f"sent nothing for {waited_s:.0f} s" if late else f"broke the connection ({error})"
        return SourceUnavailable(f"{self._name} {what}")


class ConnectionPool:
    """Kept connections by (host, port). Thread-safe. `tls` verifies servers; None for plain HTTP.

    With a `proxy` connections lead there: TLS through a tunnel, and plain requests, which must contain the full URL.
    """

    def __init__(
        self, tls: ssl.SSLContext | None, proxy: Proxy | None = None, timeouts: Timeouts | None = None
    ) -> None:
        self._tls, self._proxy, self._timeouts = tls, proxy, timeouts or Timeouts()
        self._idle: dict[tuple[str, int], list[HttpConnection]] = {}
        self._lock = threading.Lock()

    @contextmanager
    def request(
        self,
        host: str,
        port: int,
        head: bytes,
        using: Callable[[HttpConnection | None], None] = lambda _: None,
    ) -> Iterator[tuple[Response, HttpConnection]]:
        """Send one request; yield the response's head and the connection, from which the body may be read. `using` is
        told of a connection before it is used, and of None afterwards. Raises as `connect` and `HttpConnection.request`."""
        with self._lock:
            kept = self._idle.get((host, port))
            connection = kept.pop() if kept else None
        connection = connection or self.connect(host, port)
        try:
            try:
                using(connection)
                response = connection.request(head)
            except ConnectionClosed:
                if not connection.reused or connection.interrupted:
                    raise
                connection.close()  # a kept connection that had gone stale
                connection = self.connect(host, port)
                using(connection)
                response = connection.request(head)
            yield response, connection
        finally:
            using(None)
            self._put_back(host, port, connection)

    def connect(self, host: str, port: int) -> HttpConnection:
        """Return a new connection. Raises SourceUnavailable, NotAllowed for a certificate that is not trusted."""
        name = f"{host}:{port}" if self._proxy is None else f"{host}:{port} through {self._proxy.name}"
        try:
            sock = self._socket(host, port)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                sock = self._tls.wrap_socket(sock, server_hostname=host)
                # Python's timeout: its `ssl` would retry for ever after the kernel's had expired.
                sock.settimeout(self._timeouts.silence_s)
                return HttpConnection(sock, name, self._timeouts)
            # The kernel's timeouts: with Python's, every receive is two system calls.
            sock.settimeout(None)
            for option, limit_s in (
                (socket.SO_RCVTIMEO, self._timeouts.receive_s),
                (socket.SO_SNDTIMEO, self._timeouts.silence_s),
            ):
                sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(limit_s), 0))
        except CacheError:
            raise
        except ssl.SSLCertVerificationError as error:
            raise untrusted_certificate(name, error.verify_message) from error
        except OSError as error:
            raise SourceUnavailable(f"cannot connect to {name}: {error}; check the endpoint") from error
        return HttpConnection(sock, name, self._timeouts)

    def _socket(self, host: str, port: int) -> socket.socket:
        if self._proxy is None:
            return socket.create_connection((host, port), CONNECT_S)
        sock = self._proxy.connect(CONNECT_S)
        if self._tls is not None:
            status = HttpConnection(sock, self._proxy.name).request(self._proxy.tunnel(host, port)).status
            if status // 100 != 2:
                sock.close()
                raise _refused(self._proxy, status)
        return sock

    def _put_back(self, host: str, port: int, connection: HttpConnection) -> None:
        """Keep a connection for the next request; close it when it cannot be reused or enough are kept."""
        connection.reused = True
        with self._lock:
            kept = self._idle.setdefault((host, port), [])
            if connection.clean and len(kept) < IDLE_CONNECTIONS:
                kept.append(connection)
                return
        connection.close()

    def close(self) -> None:
        """Close the kept connections."""
        with self._lock:
            kept, self._idle = self._idle, {}
        for connections in kept.values():
            for connection in connections:
                connection.close()


def parse_number(text: str) -> int | None:
    """Parse decimal digits; None for any other text, also for more than 18 digits and for digits of other scripts, which
    `isdigit` accepts."""
    return int(text) if _NUMBER.fullmatch(text) else None


def retry_after_s(headers: dict[str, str]) -> float:
    """Return the seconds of Retry-After, `RETRY_AFTER_CAP_S` at most; 0 without it. A date is compared with the server's
    own Date, since this machine's clock may be wrong."""
    said = headers.get("retry-after", "")
    seconds = parse_number(said)
    if seconds is not None:
        return min(float(seconds), RETRY_AFTER_CAP_S)
    try:
        until, now = parsedate_to_datetime(said), parsedate_to_datetime(headers.get("date", ""))
        return min(max(0.0, (until - now).total_seconds()), RETRY_AFTER_CAP_S)
    # No date, one with a zone beside one without, or an impossible year or zone.
    except (TypeError, ValueError, OverflowError):
        return 0.0


def _refused(proxy: Proxy, status: int) -> CacheError:
    if status == 407:
        return proxy_needs_login(proxy.name, "https")
    if status == 403:
        return NotAllowed(f"{proxy.name} does not let requests through to this server (403)")
    return SourceUnavailable(f"{proxy.name} answered {status}")


def proxy_needs_login(said: str, scheme: str) -> NotAllowed:
    """Return the error for a proxy that requires authentication."""
    return NotAllowed(f"{said}: the proxy wants a user and a password (407), in {scheme.upper()}_PROXY")


def untrusted_certificate(name: str, why: str) -> NotAllowed:
    """Return the error for a server whose certificate is not trusted."""
    return NotAllowed(
        f"{name} shows a certificate that is not trusted ({why}); set AWS_CA_BUNDLE to the file of the authority "
        "that signed it, and name the host as the certificate does"
    )
