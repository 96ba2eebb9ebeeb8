"""Unix sockets that readers and new daemons knock at: bound with their mode, and what is said to whom they turn away."""

from __future__ import annotations

import os
import socket
from contextlib import suppress

from cachesvc.core import wire
from cachesvc.core.errors import DaemonUnavailable, InvalidInput
from cachesvc.core.wire import Message, Op

BACKLOG = 1024


def bind(path: str, mode: int) -> socket.socket:
    """A listening SEQPACKET socket. A dead daemon's socket file is replaced; a live one's is an error."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    if os.path.exists(path):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            try:
                probe.connect(path)
            except OSError:
                os.unlink(path)
            else:
                listener.close()
                raise InvalidInput(
                    f"a daemon already serves {path}; stop it or give --socket another directory"
                )
    before = os.umask(0o177)  # no moment at which others could connect
    try:
        listener.bind(path)
    finally:
        os.umask(before)
    os.chmod(path, mode)
    listener.listen(BACKLOG)
    listener.setblocking(False)
    return listener


def turn_away(channel: socket.socket, why: str) -> None:
    """End a connection that has just been made, and say why: the client raises it."""
    text = f"{why}; close readers, or raise the limit (LimitNOFILE=, ulimit -Hn)"
    channel.setblocking(False)
    with channel, suppress(OSError):
        with suppress(BlockingIOError):
            channel.recv(wire.MAX_MESSAGE_BYTES)  # what is left unread would take the answer with it
        channel.send(wire.encode(Message(Op.FAILED, 0, 0, DaemonUnavailable.code, text=text)))


def spare() -> int:
    """A descriptor to give up when no other is left."""
    return os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
