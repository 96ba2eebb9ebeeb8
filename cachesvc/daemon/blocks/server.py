"""Serves blocks of extents to other nodes (`wire.py`): a thread for each connection, a bounded number of them.

Only connections that have finished TLS count as those of members; others have a small pool of their own, from
which a crowd drives out itself and no other.

It runs in the peer agent, which has no credentials, at the lowest priority, so that the node's own readers go first.
"""

from __future__ import annotations

import errno
import logging
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from math import inf
from typing import Generic, TypeVar

from cachesvc.config import Tls
from cachesvc.core.errors import Busy, CacheError, NotFound
from cachesvc.core.model import ExtentId
from cachesvc.daemon.access.tls import TlsContexts, certificate_trouble
from cachesvc.daemon.blocks.replies import BlockReplies, Lent, SendRate
from cachesvc.daemon.blocks.wire import (
    VERSIONS,
    ConnectionEnded,
    Frame,
    Kind,
    RequestRefused,
    host_and_port,
    receive_request,
    set_timeout,
)

log = logging.getLogger(__name__)
MAX_CONNECTIONS = 256
"""At the limit a new connection replaces the one that is idle for the longest time; where none is idle, it is answered
BUSY."""
MAX_REFUSALS = 16
"""Connections that are being answered BUSY; others are closed unanswered."""
IDLE_S = 30.0
"""A connection is closed when its reader sends no request or takes no byte for this time."""
REQUEST_S = 5.0
"""The rest of a request must come within this time of its beginning."""
PARTING_S = 1.0
PARTING_BYTES = 1 << 16
"""Limits of what is read from a refused reader, so that it sees the answer: closing with unread bytes would reset the
connection and drop the answer."""
BIND_S = 0.2
"""The pause between tries to bind, while a daemon that is taken over keeps the address, and to accept, while descriptors
or threads are short."""
BACKLOG = 128
END_S = 5.0
"""How long `close` waits for the threads of connections."""

Lend = Callable[[ExtentId], AbstractContextManager[Lent]]


class _Connection:
    """An accepted connection from `host`, and the time since which it is idle: infinite before the first request was
    served, and while one is served."""

    def __init__(self, accepted: socket.socket, host: str) -> None:
        self.socket, self.host = accepted, host
        self.idle_since = inf

    def end(self) -> None:
        """Wake its thread, which closes the connection."""
        with suppress(OSError):
            _shut(self.socket, socket.SHUT_RDWR)


class BlockServer:
    """Call `listen`, then `serve` on a thread of its own choice; `close` ends it from another thread.

    `lend(extent)` is called on the connection's thread. It raises NotFound for an extent that is neither resident nor being
    filled, Busy, or another CacheError. `on_sent(bytes)` is called after each request that sent any.
    """

    def __init__(
        self,
        lend: Lend,
        tls: Tls | None = None,
        bytes_per_s: float = inf,
        on_sent: Callable[[int], None] = lambda _: None,
        max_connections: int = MAX_CONNECTIONS,
        versions: range = VERSIONS,
    ) -> None:
        """`bytes_per_s` limits all connections together; `versions` of the protocol are spoken. Raises InvalidInput for
        unusable certificates."""
        self._lend = lend
        self._tls = TlsContexts(tls) if tls else None
        self._rate = SendRate(bytes_per_s)
        self._on_sent, self._max_connections, self._versions = on_sent, max_connections, versions
        self._lock = threading.Lock()
        self._forgotten = threading.Condition(self._lock)
        self._open: set[_Connection] = set()
        """All connections."""
        self._members: set[_Connection] = set()
        """Those that have finished TLS."""
        self._handshakes: Handshakes[_Connection] = Handshakes(_Connection.end)
        self._closing = threading.Event()
        self._listener: socket.socket | None = None

    @property
    def refused(self) -> int:
        """Connections that were refused before they proved to be a member's."""
        return self._handshakes.refused

    def listen(self, address: str) -> int:
        """Listen at HOST:PORT as soon as it is free; return the port. Raises OSError where it can never be bound."""
        host, port = host_and_port(address)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        logged = False
        while True:
            try:
                self._listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
                return int(self._listener.getsockname()[1])
            except OSError as error:
                if error.errno not in (errno.EADDRINUSE, errno.EADDRNOTAVAIL) or self._closing.is_set():
                    raise
            if not logged:
                log.warning("an address for peers cannot be bound yet", extra={"advertise": address})
            logged = True
            time.sleep(BIND_S)

    def serve(self) -> None:
        """Accept connections until `close`."""
        assert self._listener is not None, "not listening"
        while not self._closing.is_set():
            try:
                accepted, (host, *_) = self._listener.accept()
                self._start(_Connection(accepted, host))
            except (OSError, RuntimeError) as error:
                if not self._closing.is_set():
                    log.warning("a peer's connection is not accepted", extra={"error": str(error)})
                    self._closing.wait(BIND_S)

    def close(self) -> None:
        """End `serve` and all connections, and wait up to `END_S` for their threads, which use what was lent to them."""
        self._closing.set()
        if self._listener is not None:
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
        with self._lock:
            connections = list(self._open)
        for each in connections:
            each.end()
        with self._forgotten:
            self._forgotten.wait_for(lambda: not self._open, END_S)

    def _start(self, connection: _Connection) -> None:
        with self._lock:
            if len(self._open) >= self._max_connections + MAX_REFUSALS + 2 * HANDSHAKES:
                connection.socket.close()
                return
            self._open.add(connection)
        if self._tls is not None:
            self._handshakes.began(connection, connection.host)
        try:
            threading.Thread(target=self._run, args=(connection,), name="peer", daemon=True).start()
        except RuntimeError:
            self._forget(connection)
            raise

    def _admit(self, connection: _Connection) -> bool:
        """Count a connection as a member's; return whether there are too many. Raises ConnectionEnded where even refusals
        are."""
        with self._lock:
            busy = len(self._members) >= self._max_connections and not self._end_idle()
            if len(self._members) >= self._max_connections + MAX_REFUSALS:
                raise ConnectionEnded(0)
            self._members.add(connection)
            return busy

    def _end_idle(self) -> bool:
        """End the connection that is idle for the longest time; return whether there is one."""
        longest = min(self._members, key=lambda each: each.idle_since, default=None)
        if longest is None or longest.idle_since == inf:
            return False
        longest.idle_since = inf
        longest.end()
        return True

    def _forget(self, connection: _Connection) -> None:
        self._handshakes.finished(connection)
        connection.socket.close()
        with self._forgotten:
            self._open.discard(connection)
            self._members.discard(connection)
            self._forgotten.notify_all()

    def _run(self, connection: _Connection) -> None:
        """Serve one connection. It may end at any time, which is no error."""
        try:
            if self._tls is not None:
                self._shake_hands(connection, self._tls)
            busy = self._admit(connection)
            set_timeout(connection.socket, REQUEST_S if busy else IDLE_S, self._tls is not None)
            replies = BlockReplies(connection.socket, self._rate, self._closing)
            self._serve_requests(connection, replies, busy)
        except (OSError, ConnectionEnded) as error:
            log.debug("a peer's connection ended", extra={"error": str(error)})
        finally:
            self._forget(connection)

    def _shake_hands(self, connection: _Connection, tls: TlsContexts) -> None:
        """Make the TLS handshake, in `HANDSHAKE_S` at most. Raises OSError, ConnectionEnded where a crowd ended it."""
        set_timeout(connection.socket, HANDSHAKE_S, tls=True)
        try:
            connection.socket = accepted = tls.accept(connection.socket)
            accepted.do_handshake()
        except OSError as error:
            left = isinstance(error, (ConnectionError, ssl.SSLEOFError))  # as probes of the port do
            if self._handshakes.finished(connection) and not left:  # else it is counted already
                self._handshakes.failed(connection.host, _why_refused(error))
            raise
        if not self._handshakes.finished(connection):
            raise ConnectionEnded(0)

    def _serve_requests(self, connection: _Connection, replies: BlockReplies, busy: bool) -> None:
        try:
            while not self._closing.is_set():
                replies.version = self._versions[-1]
                request = receive_request(connection.socket, REQUEST_S, self._versions)
                replies.version = request.version
                connection.idle_since = inf
                if busy:
                    raise RequestRefused(Kind.BUSY)
                before = replies.sent_bytes
                try:
                    with self._lend(request.extent) as lent:
                        replies.answer(lent, request.ranges)
                except NotFound:
                    replies.say(Frame(Kind.NOT_FOUND))
                except Busy:
                    raise RequestRefused(Kind.BUSY) from None
                except CacheError as error:
                    log.warning("an extent cannot be lent", extra={"error": str(error)})
                    raise RequestRefused(Kind.FAILED) from error
                finally:
                    if replies.sent_bytes > before:
                        self._on_sent(replies.sent_bytes - before)
                connection.idle_since = time.monotonic()
        except RequestRefused as refused:
            replies.say(Frame(refused.answer))
            _part(connection.socket)


def _why_refused(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return f"it did not finish the TLS handshake in {HANDSHAKE_S:g} s"
    return certificate_trouble(error) or "it made no TLS handshake"


def _part(connection: socket.socket) -> None:
    """Let the reader see the last frame before the connection is closed."""
    set_timeout(connection, PARTING_S, isinstance(connection, ssl.SSLSocket))
    _shut(connection, socket.SHUT_WR)
    left, end = PARTING_BYTES, time.monotonic() + PARTING_S
    while left > 0 and time.monotonic() < end and (got := connection.recv(1 << 12)):
        left -= len(got)


def _shut(connection: socket.socket, how: int) -> None:
    """Call shutdown(2). SSLSocket's own method drops the encryption first, and another thread may be sending."""
    socket.socket.shutdown(connection, how)


HANDSHAKES = 32
"""Handshakes at a time. Each has a thread."""
HANDSHAKE_S = 5.0
"""The time that a handshake has."""
_Member = TypeVar("_Member")


class Handshakes(Generic[_Member]):
    """The pool. Thread-safe. `end` ends a connection, which then calls `finished`."""

    def __init__(self, end: Callable[[_Member], None], limit: int = HANDSHAKES) -> None:
        self._end, self._limit = end, limit
        self._lock = threading.Lock()
        self._waiting: dict[_Member, str] = {}
        """The host of each connection, the oldest connection first."""
        self.refused = 0
        """Connections that were ended or refused before they proved to be a member's."""

    def began(self, connection: _Member, host: str) -> None:
        """Take a connection; where the pool is full, end the oldest one of the host that has the most."""
        crowding: _Member | None = None
        with self._lock:
            self._waiting[connection] = host
            if len(self._waiting) > self._limit:
                ((crowd, _),) = Counter(self._waiting.values()).most_common(1)
                crowding = next(each for each, its in self._waiting.items() if its == crowd)
                del self._waiting[crowding]
        if crowding is not None:
            self.failed(crowd, "it opens connections and does not finish their TLS handshakes")
            self._end(crowding)

    def finished(self, connection: _Member) -> bool:
        """Return whether the connection was still in the pool, and remove it."""
        with self._lock:
            return self._waiting.pop(connection, None) is not None

    def failed(self, host: str, why: str) -> None:
        """Count and log a connection that is refused."""
        with self._lock:
            self.refused += 1
        log.warning("a connection to the port of extents is refused", extra={"host": host, "why": why})
