"""SOCK_SEQPACKET datagrams with one descriptor or none."""

from __future__ import annotations

import socket
import struct
from contextlib import suppress

_DESCRIPTOR = struct.Struct("i")
_ROOM_FOR_ONE = socket.CMSG_LEN(_DESCRIPTOR.size)


def send(channel: socket.socket, data: bytes, fd: int | None) -> None:
    """Send a datagram; the descriptor stays the caller's. Raises OSError."""
    if fd is None:
        channel.send(data)
    else:
        channel.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, _DESCRIPTOR.pack(fd))])


def receive(channel: socket.socket, size_bytes: int) -> tuple[bytes, int | None]:
    """Receive a datagram of at most `size_bytes`, b"" where the other side has closed; the descriptor is the caller's.

    The kernel closes further descriptors. Raises OSError.
    """
    given = size_bytes, _ROOM_FOR_ONE, socket.MSG_CMSG_CLOEXEC
    try:
        data, rights, _, _ = channel.recvmsg(*given)
    except ConnectionResetError:  # the other side had not read all; what it sent comes after the error
        data, rights, _, _ = channel.recvmsg(*given)
    return data, _DESCRIPTOR.unpack(rights[0][2])[0] if rights else None


def close(channel: socket.socket) -> None:
    """Read the remaining datagrams and close the connection.

    After a close with unread datagrams the peer gets a connection reset before the datagrams that were sent to it.
    """
    with suppress(OSError):
        channel.shutdown(socket.SHUT_RDWR)  # no more datagrams arrive
        while channel.recv(1, socket.MSG_DONTWAIT):
            pass
    channel.close()
