"""Tells the daemon who calls its control API: gRPC over a Unix socket does not say it, the grants socket does.

A connection to the grants socket without a dataset; the daemon reads the user from the kernel and answers with
a token that stands for this connection while it lives. See daemon/access/tenants.py.
"""

from __future__ import annotations

import select
import socket

from cachesvc.config import GRANTS_SOCKET
from cachesvc.core import wire
from cachesvc.core.errors import DeadlineExceeded
from cachesvc.core.wire import Op

TOKEN_KEY = "cachesvc-token"
TIMEOUT_S = 30.0


class CallerIdentity:
    """One caller. Connects at the first call and again after the daemon was restarted; not for use across a fork."""

    def __init__(self, directory: str) -> None:
        self._path = f"{directory}/{GRANTS_SOCKET}"
        self._channel: socket.socket | None = None
        self._token = 0

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """gRPC metadata for one call; empty where the grants socket does not answer, and then the call itself
        finds out what is wrong. Raises DeadlineExceeded."""
        if not self.lives():
            self.close()
        if self._channel is None:
            self._connect()
        return ((TOKEN_KEY, str(self._token)),) if self._channel is not None else ()

    def close(self) -> None:
        """End the connection, and with it what the token is worth."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def lives(self) -> bool:
        """Whether there is a connection whose other end is held by a daemon: by the one that took over, perhaps."""
        if self._channel is None:
            return False
        gone = select.poll()
        gone.register(self._channel, select.POLLRDHUP)
        return not gone.poll(0)

    def _connect(self) -> None:
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        channel.settimeout(TIMEOUT_S)
        try:
            channel.connect(self._path)
            channel.send(wire.encode(Op.IDENTIFY, wire.MAGIC))
            answer = wire.decode(channel.recv(wire.MAX_MESSAGE_BYTES))
            if answer.op is not Op.WELCOME:
                raise ValueError(answer.text)
        except TimeoutError:
            channel.close()
            raise DeadlineExceeded(
                f"the daemon at {self._path} did not answer in {TIMEOUT_S:.0f} s"
            ) from None
        except (OSError, ValueError):
            channel.close()
            return
        self._channel, self._token = channel, answer.size
