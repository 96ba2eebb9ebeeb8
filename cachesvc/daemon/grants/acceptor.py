"""Accepts connections to the grants socket, and refuses those beyond a limit with a typed error."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import suppress

from cachesvc.core import wire
from cachesvc.core.errors import DaemonUnavailable
from cachesvc.core.wire import Op
from cachesvc.daemon.access.quotas import UserCap
from cachesvc.daemon.access.tenants import Peer, peer_of
from cachesvc.daemon.events.event import failed, record
from cachesvc.daemon.unix_sockets import bind, identity, remove
from cachesvc.system import datagrams

SEND_BUFFER_BYTES = 1 << 18
"""The queue of answers to one reader, as far as the kernel allows (`wmem_max`, 208 KiB by default): 333 answers of 1.25
KiB, which is what the kernel counts for one, twice over. The kernel's own default holds half."""


class Acceptor:
    """Owns the listening socket. One user other than the daemon's gets half of all connections."""

    def __init__(
        self,
        path: str,
        mode: int,
        max_connections: int,
        accepted: Callable[[socket.socket, Peer], None],
    ) -> None:
        """`accepted` owns the socket that it is given."""
        self._max_connections = max_connections
        self._cap = UserCap(per_user=max_connections // 2)
        self._accepted = accepted
        self._path, self._mode = path, mode
        self.listener = bind(path, mode)
        self._file = identity(path)
        self._spare = _spare_descriptor()

    def is_in_place(self) -> bool:
        """Tell whether the socket's path still leads to this listener."""
        return self._file is not None and identity(self._path) == self._file

    def bind_again(self) -> None:
        """Listen at a new socket, since the file of the old one was removed. Raises as `bind`."""
        listener = bind(self._path, self._mode)
        self.listener.close()
        self.listener, self._file = listener, identity(self._path)

    def close(self) -> None:
        """Close the listening socket and remove its file."""
        self.listener.close()
        os.close(self._spare)
        remove(self._path, self._file)

    def accept(self) -> None:
        """Accept one connection, or refuse it."""
        try:
            channel, _ = self.listener.accept()
        except BlockingIOError:
            return
        except OSError:
            self._refuse_with_spare()
            return
        peer = peer_of(channel)
        if self._cap.count >= self._max_connections:
            limit = f"{self._max_connections} readers, as many as its limit of open files allows"
            _refuse(channel, f"the daemon has {limit}", peer)
        elif not self._cap.take(peer.uid):
            _refuse(channel, "this user has half of all connections to the daemon", peer)
        else:
            channel.setblocking(False)
            channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
            self._accepted(channel, peer)

    def left(self, peer: Peer) -> None:
        """Stop counting a connection that has ended."""
        self._cap.give_back(peer.uid)

    def _refuse_with_spare(self) -> None:
        """No descriptor is left. Without an answer the client would retry, and the listener stay readable, for ever:
        close the spare descriptor to accept the connection and refuse it."""
        os.close(self._spare)
        with suppress(OSError):
            channel, _ = self.listener.accept()
            _refuse(channel, "the daemon has as many files open as its limit allows", peer_of(channel))
        self._spare = _spare_descriptor()


def _refuse(channel: socket.socket, reason: str, peer: Peer) -> None:
    """Close a new connection; its client raises the error that is sent."""
    text = f"{reason}; close readers, or raise the limit (LimitNOFILE=, ulimit -Hn)"
    record(failed("refused", DaemonUnavailable(reason), uid=peer.uid, pid=peer.pid))
    channel.setblocking(False)
    with suppress(OSError):
        channel.send(wire.encode(Op.FAILED, 0, 0, DaemonUnavailable.code, text=text))
    datagrams.close(channel)


def _spare_descriptor() -> int:
    return os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
