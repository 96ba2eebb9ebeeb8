"""Sends and receives SOCK_SEQPACKET datagrams with one descriptor or none."""

from __future__ import annotations

import socket
import struct
from contextlib import suppress

_DESCRIPTOR = struct.Struct("i")
_ROOM_FOR_ONE = socket.CMSG_LEN(_DESCRIPTOR.size)


def send(channel: socket.socket, data: bytes, fd: int | None) -> None:
    """The descriptor stays the caller's. Raises OSError."""
    if fd is None:
        channel.send(data)
    else:
        channel.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, _DESCRIPTOR.pack(fd))])


def receive(channel: socket.socket, size_bytes: int) -> tuple[bytes, int | None]:
    """At most so many bytes, none at the other side's end; the descriptor is the caller's. More than one are closed by
    the kernel. Raises OSError."""
    data, rights, _, _ = channel.recvmsg(size_bytes, _ROOM_FOR_ONE, socket.MSG_CMSG_CLOEXEC)
    return data, _DESCRIPTOR.unpack(rights[0][2])[0] if rights else None


def close(channel: socket.socket) -> None:
    """Read what is left and close a connection: with datagrams unread, the kernel would tell the peer of a reset before
    it gives out what was sent to it."""
    with suppress(OSError):
        channel.shutdown(socket.SHUT_RDWR)  # no more can come
        while channel.recv(1, socket.MSG_DONTWAIT):
            pass
    channel.close()
