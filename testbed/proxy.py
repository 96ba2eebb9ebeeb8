"""A counting HTTP proxy in front of the S3 server, with a delay, a rate per connection, and faults.

It parses request and response heads only. Bodies pass by `splice`, so that the proxy stays cheap beside what it
measures. `Host` is forwarded unchanged, because SigV4 signs it. Each connection has a thread. `GET /__counts` returns
the counts as JSON, `GET /__reset` sets them to zero.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import signal
import socket
import struct
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal

PIPE_BYTES = 1 << 20
MAX_HEAD_BYTES = 64 << 10
STALL_LIMIT_S = 60.0
BURST_S = 0.05
"""So much of the shared rate may be caught up on, since a busy machine serves connections late."""
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.I)
_RANGE = re.compile(rb"\r\nrange: *([^\r]+)", re.I)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding: *chunked", re.I)
_EXPECT = re.compile(rb"\r\nexpect: *100-continue", re.I)
_IF_MATCH = re.compile(rb"\r\nif-match: *[^\r]+", re.I)
_CLOSE = re.compile(rb"\r\nconnection: *close", re.I)


@dataclass
class Fault:
    """A fault that the next `times` GETs, or requests of another `method`, meet whose path contains `path`.

    status           answer `status` (with S3's error `code` and Retry-After where given) without asking the server
    cut              close the connection after `after_bytes` of the body
    reset            the same, by RST
    stall            the same, but keep the connection open and send nothing more
    length           announce one byte more than the body has, then close
    flip             invert one bit of the body's byte at `after_bytes`
    ignore-range     hide the Range header from the server
    ignore-if-match  hide the If-Match header from the server
    slow             wait `after_s` before asking the server
    hold             wait for `until` before asking the server
    """

    kind: Literal[
        "status", "cut", "reset", "length", "stall", "flip", "ignore-range", "ignore-if-match", "slow", "hold"
    ]
    times: int = 1
    path: str = ""
    after_bytes: int = 0
    after_s: float = 0.0
    status: int = 503
    code: str = ""
    retry_after_s: int | None = None
    until: threading.Event = field(default_factory=threading.Event)
    method: str = "GET"


@dataclass
class Counts:
    """Counts of what passed. `by` counts each "METHOD path range"; `bytes` are response body bytes. Where the rate of
    GETs is limited, `gets` holds the time of each GET and whether it passed."""

    requests: int = 0
    bytes: int = 0
    by: Counter[str] = field(default_factory=Counter)
    gets: list[tuple[float, bool]] = field(default_factory=list)

    def as_json(self) -> str:
        """The fields as one JSON object."""
        return json.dumps(vars(self))


class _Hangup(Exception):
    """Ends a connection: one of its ends is gone, or a fault closes it."""


class _Wire:
    """One end of a connection: a socket and the bytes read ahead from it."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.ahead = b""

    def _more(self) -> None:
        got = self.sock.recv(64 << 10)
        if not got:
            raise _Hangup
        self.ahead += got

    def head(self) -> bytes:
        """Read up to and including the empty line."""
        while (end := self.ahead.find(b"\r\n\r\n")) < 0:
            if len(self.ahead) > MAX_HEAD_BYTES:
                raise _Hangup
            self._more()
        head, self.ahead = self.ahead[: end + 4], self.ahead[end + 4 :]
        return head

    def line(self) -> bytes:
        """Read up to and including the line end."""
        while (end := self.ahead.find(b"\r\n")) < 0:
            self._more()
        line, self.ahead = self.ahead[: end + 2], self.ahead[end + 2 :]
        return line


class Proxy:
    """Context manager that serves on a free port of `host`, which is loopback by default, from its own threads.

    `rate` limits the bytes per second of each connection (0: no limit). `delay_s` is added to each request. Tests
    append to `faults`; a GET uses up the first that matches. `gets_per_s` limits GETs of objects (0: no limit) with
    bursts of a tenth of a second. A GET beyond it gets 503 SlowDown, or 429 with Retry-After where `retry_after_s` is set.
    `shared_rate` limits the bytes per second of all connections together. Each GET of an object whose number is a multiple
    of `hang_every` (0: none) waits for `hang_s`.
    """

    def __init__(
        self,
        target: str,
        delay_s: float = 0.0,
        rate: float = 0.0,
        port: int = 0,
        gets_per_s: float = 0.0,
        host: str = "127.0.0.1",
    ) -> None:
        to, _, number = target.rpartition(":")
        self.target = (to.removeprefix("http://"), int(number))
        self.delay_s = delay_s
        self.rate = rate
        self.gets_per_s = gets_per_s
        self.retry_after_s: int | None = None
        self.shared_rate, self.hang_every, self.hang_s = 0.0, 0, 0.0
        self._allowed = (0.0, 0.0)
        self._object_gets, self._free_at = 0, 0.0
        self.faults: list[Fault] = []
        self.counts = Counts()
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._open: set[socket.socket] = set()
        self.reading: set[tuple[str, int]] = set()
        """Addresses of clients whose GETs of objects are being answered. Each operation on it is atomic."""
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server((host, port), backlog=512)
        self.port: int = self._listener.getsockname()[1]
        self.endpoint = f"http://{host}:{self.port}"

    def __enter__(self) -> Proxy:
        self._acceptor = threading.Thread(target=self._accept, daemon=True)
        self._acceptor.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._acceptor.join()
        self.hang_up()
        for thread in self._threads:
            thread.join()

    def hang_up(self) -> None:
        """Break every open connection, as a restarted load balancer does."""
        with self._lock:
            for sock in self._open:
                try:
                    sock.shutdown(socket.SHUT_RDWR)
                except OSError:  # the other end was first
                    pass

    def reset(self) -> None:
        """Set the counts to zero."""
        with self._lock:
            self.counts = Counts()

    def _accept(self) -> None:
        while not self._stopped.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:  # the listener was closed
                return
            thread = threading.Thread(target=self._serve, args=(client,), daemon=True)
            self._threads = [t for t in self._threads if t.is_alive()] + [thread]
            thread.start()

    def _serve(self, client: socket.socket) -> None:
        inlet, outlet = os.pipe()
        fcntl.fcntl(outlet, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        server = socket.socket()
        with self._lock:
            self._open |= {client, server}
        try:
            server.connect(self.target)
            exchange = _Exchange(self, _Wire(client), _Wire(server), inlet, outlet)
            while not self._stopped.is_set():
                exchange.once()
        except (_Hangup, OSError):  # either end may vanish at any time; that ends this connection only
            pass
        finally:
            with self._lock:
                self._open -= {client, server}
            for sock in (client, server):
                sock.close()
            os.close(inlet)
            os.close(outlet)

    def take_fault(self, method: str, path: str) -> Fault | None:
        """The fault for this request, if any; uses it up once."""
        if not self.faults:
            return None
        with self._lock:
            for fault in self.faults:
                if fault.times > 0 and fault.method == method and fault.path in path:
                    fault.times -= 1
                    return fault
        return None

    def refuses(self, method: str, path: str) -> bool:
        """True when this GET is beyond `gets_per_s`."""
        if not self.gets_per_s or method != "GET" or "list-type" in path:
            return False
        with self._lock:
            now, (level, at) = time.monotonic(), self._allowed
            level = min(max(1.0, self.gets_per_s / 10), level + (now - at) * self.gets_per_s)
            passes = level >= 1
            self._allowed = (level - passes, now)
            self.counts.gets.append((now, passes))
            return not passes

    def hangs(self, method: str, path: str) -> bool:
        """True when this GET is to wait."""
        if not self.hang_every or method != "GET" or "list-type" in path:
            return False
        with self._lock:
            self._object_gets += 1
            return self._object_gets % self.hang_every == 0

    def turn_s(self, size: int) -> float:
        """Take a turn of so many bytes in the shared rate. Return how long to wait for its end."""
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now - BURST_S) + size / self.shared_rate
            return self._free_at - now

    def count_request(self, method: str, path: str, span: str) -> None:
        with self._lock:
            self.counts.requests += 1
            self.counts.by[f"{method} {path} {span}".rstrip()] += 1

    def count_bytes(self, size: int) -> None:
        with self._lock:
            self.counts.bytes += size

    def pause(self, seconds: float) -> None:
        """Sleep until `seconds` have passed or the proxy stops."""
        self._stopped.wait(seconds)


class _Exchange:
    """Passes requests and answers over one pair of connections."""

    def __init__(self, proxy: Proxy, client: _Wire, server: _Wire, inlet: int, outlet: int) -> None:
        self.proxy, self.client, self.server = proxy, client, server
        self.inlet, self.outlet = inlet, outlet
        self.free_at = 0.0

    def once(self) -> None:
        """Pass one request and its answer."""
        head = self.client.head()
        method, path = head.split(b" ", 2)[:2]
        if method == b"PRI":  # HTTP/2: a gRPC client that still tries a port which another test's server had
            raise _Hangup
        if path in (b"/__counts", b"/__reset"):
            return self._answer_self(path)
        match = _RANGE.search(head)
        self.proxy.count_request(method.decode(), path.decode(), match[1].decode() if match else "")
        client = self.client.sock.getpeername()
        if method == b"GET" and b"list-type" not in path:
            self.proxy.reading.add(client)
        try:
            answer = self._answer(method, path.decode(), head)
        finally:
            self.proxy.reading.discard(client)
        if answer and (_CLOSE.search(answer) or _CLOSE.search(head)):
            raise _Hangup

    def _answer(self, method: bytes, path: str, head: bytes) -> bytes:
        """Pass a request and its answer, or refuse it. Returns the answer's head, empty for a refusal."""
        fault = self.proxy.take_fault(method.decode(), path)
        if self.proxy.hangs(method.decode(), path):
            fault = Fault("slow", after_s=self.proxy.hang_s)
        if self.proxy.refuses(method.decode(), path):
            fault = Fault("status", code="SlowDown")
            if (wait_s := self.proxy.retry_after_s) is not None:
                fault = Fault("status", status=429, code="TooManyRequests", retry_after_s=wait_s)
        if self.proxy.delay_s:
            time.sleep(self.proxy.delay_s)
        if fault is not None and fault.kind == "status":
            self._refuse(fault)
            return b""
        if fault is not None and fault.kind == "slow":
            self.proxy.pause(fault.after_s)
        if fault is not None and fault.kind == "hold":
            fault.until.wait(STALL_LIMIT_S)
        self._pass_request(head, fault)
        answer = self.server.head()
        if fault is not None and fault.kind == "length":
            answer = _LENGTH.sub(lambda found: b"\r\nContent-Length: %d" % (int(found[1]) + 1), answer)
        self.client.sock.sendall(answer)
        self._pass_answer(method, answer, fault)
        return answer

    def _pass_request(self, head: bytes, fault: Fault | None) -> None:
        if _EXPECT.search(head):  # answered here, so that the body need not wait for the server's answer
            head = _EXPECT.sub(b"", head)
            self.client.sock.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        if fault is not None and fault.kind == "ignore-range":
            head = _RANGE.sub(b"", head)
        if fault is not None and fault.kind == "ignore-if-match":
            head = _IF_MATCH.sub(b"", head)
        self.server.sock.sendall(head)
        if _CHUNKED.search(head):
            self._copy_chunked(self.client, self.server)
        elif length := _LENGTH.search(head):
            self._copy(self.client, self.server, int(length[1]))

    def _pass_answer(self, method: bytes, answer: bytes, fault: Fault | None) -> None:
        status = int(answer.split(b" ", 2)[1])
        if method == b"HEAD" or status in (204, 304):
            return
        if _CHUNKED.search(answer):
            return self._copy_chunked(self.server, self.client)
        match = _LENGTH.search(answer)
        if match is None:
            raise _Hangup
        size = int(match[1])
        if fault is not None and fault.kind == "length":
            self._paced(size - 1)
            raise _Hangup
        if fault is None or fault.kind not in ("cut", "reset", "stall", "flip"):
            return self._paced(size)
        self._paced(min(size, fault.after_bytes))
        self._spoil(fault, size - min(size, fault.after_bytes))

    def _spoil(self, fault: Fault, left: int) -> None:
        if fault.kind == "stall":
            self.proxy.pause(STALL_LIMIT_S)
        if fault.kind == "reset":  # close() then sends RST
            self.client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if fault.kind != "flip":
            raise _Hangup
        while not self.server.ahead:
            self.server._more()
        self.server.ahead = bytes([self.server.ahead[0] ^ 1 << fault.after_bytes % 8]) + self.server.ahead[1:]
        self._paced(left)

    def _paced(self, size: int) -> None:
        """Pass body bytes to the client no faster than the rate. Bytes are counted before they are sent, so that a
        client that has them also sees them counted."""
        rate, step = self.proxy.rate, (32 << 10) if self.proxy.shared_rate else (256 << 10)
        if not rate and not self.proxy.shared_rate:
            self.proxy.count_bytes(size)
            self._copy(self.server, self.client, size)
        else:
            left = size
            while left:
                part = min(left, step)
                self.proxy.count_bytes(part)
                self._copy(self.server, self.client, part)
                left -= part
                if self.proxy.shared_rate:
                    self.proxy.pause(max(0.0, self.proxy.turn_s(part)))
                    continue
                now = time.monotonic()
                self.free_at = max(self.free_at, now - 0.002) + part / rate
                if self.free_at - now > 0.001:
                    time.sleep(self.free_at - now)

    def _copy(self, source: _Wire, sink: _Wire, size: int) -> None:
        """Copy `size` bytes: first those read ahead, the others through the pipe, without reading them."""
        part, source.ahead = source.ahead[:size], source.ahead[size:]
        if part:
            sink.sock.sendall(part)
        left = size - len(part)
        while left:
            held = os.splice(source.sock.fileno(), self.outlet, min(left, PIPE_BYTES))
            if not held:
                raise _Hangup
            left -= held
            while held:
                held -= os.splice(self.inlet, sink.sock.fileno(), held)

    def _copy_chunked(self, source: _Wire, sink: _Wire) -> None:
        while True:
            line = source.line()
            sink.sock.sendall(line)
            size = int(line.split(b";")[0], 16)
            self.proxy.count_bytes(size)
            self._copy(source, sink, size + 2)
            if not size:
                return

    def _refuse(self, fault: Fault) -> None:
        wait = f"Retry-After: {fault.retry_after_s}\r\n" if fault.retry_after_s is not None else ""
        body = f"<Error><Code>{fault.code}</Code></Error>" if fault.code else ""
        head = f"HTTP/1.1 {fault.status} Fault\r\n{wait}Content-Length: {len(body)}\r\n\r\n"
        self.client.sock.sendall((head + body).encode())

    def _answer_self(self, path: bytes) -> None:
        body = self.proxy.counts.as_json().encode()
        if path == b"/__reset":
            self.proxy.reset()
        self.client.sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)


def _main() -> None:
    """Serve until SIGTERM; print the endpoint first."""
    parser = argparse.ArgumentParser(prog="python -m testbed.proxy")
    parser.add_argument("--target", required=True)
    for name in ("--delay-ms", "--rate-mb", "--gets-per-s", "--shared-rate-mb", "--hang-s"):
        parser.add_argument(name, type=float, default=0.0)
    parser.add_argument("--hang-every", type=int, default=0)
    parser.add_argument("--retry-after-s", type=int)
    chosen = parser.parse_args()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    found = Proxy(chosen.target, chosen.delay_ms / 1000, chosen.rate_mb * 1e6, gets_per_s=chosen.gets_per_s)
    found.retry_after_s = chosen.retry_after_s
    found.shared_rate, found.hang_every, found.hang_s = (
        chosen.shared_rate_mb * 1e6,
        chosen.hang_every,
        chosen.hang_s,
    )
    with found:
        print(found.endpoint, flush=True)
        signal.sigwait({signal.SIGTERM})


if __name__ == "__main__":
    _main()
