"""One SOCK_SEQPACKET datagram, with one descriptor or none; from strangers, with as many as they like.

What the kernel closes for us (descriptors beyond the room given, a socket's unread datagrams) it closes in the thread that
called it, and that may wait for ever: so of a stranger's datagrams all is taken."""

from __future__ import annotations

import array
import socket
import struct
from contextlib import suppress

_DESCRIPTOR = struct.Struct("i")
_ROOM_FOR_ONE = socket.CMSG_LEN(_DESCRIPTOR.size)
_ROOM_FOR_ALL = socket.CMSG_LEN(_DESCRIPTOR.size * 253)  # the kernel's SCM_MAX_FD
_ROOM_FOR_CREDENTIALS = socket.CMSG_SPACE(struct.calcsize("3i"))
_PEEK = socket.MSG_PEEK | socket.MSG_DONTWAIT
MOST_UNREAD = 1024
"""Datagrams; a sender's buffer holds fewer, unless its machine is set up otherwise."""


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


def receive_all(channel: socket.socket, size_bytes: int) -> tuple[bytes, list[int]]:
    """As `receive`, with every descriptor that came."""
    data, rights, _, _ = channel.recvmsg(size_bytes, _ROOM_FOR_ALL, socket.MSG_CMSG_CLOEXEC)
    return data, list(array.array("i", rights[0][2])) if rights else []


def carries(channel: socket.socket) -> bool:
    """Whether the next datagram has descriptors; it stays where it is. Raises OSError."""
    return bool(channel.recvmsg(1, 0, _PEEK)[2] & socket.MSG_CTRUNC)


def emptied(channel: socket.socket) -> bool:
    """End a connection, without closing it, and read what is left. False where that has descriptors: to close the socket
    would close them."""
    with suppress(OSError):
        channel.shutdown(socket.SHUT_RDWR)  # no more can come
        channel.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)  # so that no datagram looks like the end
        for _ in range(MOST_UNREAD):
            _, said, flags, _ = channel.recvmsg(1, _ROOM_FOR_CREDENTIALS, _PEEK)
            if flags & socket.MSG_CTRUNC:
                return False
            if not said:
                return True
            channel.recv(1, socket.MSG_DONTWAIT)
    return False
