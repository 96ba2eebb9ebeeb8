"""TCP relays before a real server: TLS to its clients, and flipped bits on the way to them."""

from __future__ import annotations

import contextlib
import random
import socket
import ssl
import threading
from collections.abc import Callable
from types import TracebackType

import trustme

from testbed import WAIT_S

PIECE_BYTES = 64 << 10


class Relay:
    """A loopback port that relays connections to `port`. Context manager.

    `context`: TLS for clients; None for plain TCP. `spoil` may change the bytes on the way to a client.
    """

    def __init__(
        self,
        port: int,
        context: ssl.SSLContext | None = None,
        spoil: Callable[[bytearray], None] | None = None,
    ) -> None:
        self._to, self._context, self._spoil = port, context, spoil
        self._open: set[socket.socket] = set()
        self._lock, self._threads = threading.Lock(), list[threading.Thread]()

    def __enter__(self) -> Relay:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._start(self._accept)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            ending = [self._listener, *self._open]
        for sock in ending:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(WAIT_S)
        self._listener.close()

    def _start(self, work: Callable[..., None], *given: socket.socket) -> None:
        thread = threading.Thread(target=work, args=given, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the listener is closed
            while True:
                self._start(self._serve, self._listener.accept()[0])

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError), client:
            inner = client
            if self._context is not None:
                client.settimeout(WAIT_S)
                inner = self._context.wrap_socket(client, server_side=True)
                inner.settimeout(None)
            with inner, socket.create_connection(("127.0.0.1", self._to)) as server:
                with self._lock:
                    self._open |= {inner, server}
                there = threading.Thread(target=self._pump, args=(inner, server, None), daemon=True)
                there.start()
                self._pump(server, inner, self._spoil)
                there.join(WAIT_S)
                with self._lock:
                    self._open -= {inner, server}

    def _pump(
        self, source: socket.socket, sink: socket.socket, spoil: Callable[[bytearray], None] | None
    ) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(PIECE_BYTES):
                changed = bytearray(piece)
                if spoil is not None:
                    spoil(changed)
                sink.sendall(changed)
        for each in (source, sink):
            with contextlib.suppress(OSError):
                socket.socket.shutdown(each, socket.SHUT_RDWR)


class FlipsBits:
    """Flips one bit about every `every_bytes`. `count`: the bits flipped so far."""

    def __init__(self, seed: int, every_bytes: int) -> None:
        self._draw, self._every = random.Random(seed), every_bytes
        self._left, self._lock, self.count = every_bytes, threading.Lock(), 0

    def __call__(self, piece: bytearray) -> None:
        with self._lock:
            if self._left < len(piece):
                piece[self._left] ^= 1 << self._draw.randrange(8)
                self._left = self._draw.randrange(self._every, 2 * self._every)
                self.count += 1
            else:
                self._left -= len(piece)


def terminating(authority: trustme.CA, host: str = "127.0.0.1") -> ssl.SSLContext:
    found = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(host).configure_cert(found)
    return found
