"""SOCK_SEQPACKET datagrams with one descriptor or none."""

from __future__ import annotations

import socket
from contextlib import suppress


def send(channel: socket.socket, data: bytes, fd: int | None) -> None:
    """Send a datagram; the descriptor stays the caller's. Raises OSError."""
    if fd is None:
        channel.send(data)
    else:
        socket.send_fds(channel, [data], [fd])


def receive(channel: socket.socket, size_bytes: int) -> tuple[bytes, int | None]:
    """Receive a datagram of at most `size_bytes`, b"" where the other side has closed; the descriptor is the caller's.

    The kernel closes further descriptors. Raises OSError.
    """
    given = channel, size_bytes, 1, socket.MSG_CMSG_CLOEXEC
    try:
        data, descriptors, _, _ = socket.recv_fds(*given)
    except ConnectionResetError:  # the other side had not read all; what it sent comes after the error
        data, descriptors, _, _ = socket.recv_fds(*given)
    return data, descriptors[0] if descriptors else None


def close(channel: socket.socket) -> None:
    """Read the remaining datagrams and close the connection.

    After a close with unread datagrams the peer gets a connection reset before the datagrams that were sent to it.
    """
    with suppress(OSError):
        channel.shutdown(socket.SHUT_RDWR)  # no more datagrams arrive
        while channel.recv(1, socket.MSG_DONTWAIT):
            pass
    channel.close()
