"""Datagrams between the daemon and its own processes: one msgspec struct each, with descriptors beside it. Never pickled.

The structs of each channel are a tagged union in one module: `jobs.py`, `fork_server.py`, `peers/messages.py`. Decoding
checks the types of all fields, since the sending process may read untrusted data.
"""

from __future__ import annotations

import os
import socket
from typing import Any, Generic, TypeVar

import msgspec

MAX_DATAGRAM_BYTES = 192 << 10
"""Under the kernel's default socket buffer; checksums of a 1 GiB extent are 131 KB."""
MAX_BODY_BYTES = 256 << 20
"""The limit of a message in a memfd: 100,000 URIs of the longest kind."""
MAX_DESCRIPTORS = 64
"""The kernel allows 253."""
BODY_IN_MEMFD = b"+"
"""A datagram that is no message: its message is in the memfd behind its descriptors."""
RECEIVE_ERRORS = (OSError, ValueError, IndexError)
"""Errors of `Receiver` when the other process has ended or sent an invalid message."""
_Message = TypeVar("_Message")


def send(channel: socket.socket, message: msgspec.Struct, descriptors: tuple[int, ...] = ()) -> None:
    """Send one datagram with descriptors, which stay the caller's. Raises OSError.

    A message longer than a datagram, such as a build of thousands of URIs, travels in a memfd behind the descriptors.
    """
    data = msgspec.msgpack.encode(message)
    if len(data) <= MAX_DATAGRAM_BYTES:
        socket.send_fds(channel, [data], list(descriptors))
        return
    with os.fdopen(os.memfd_create("cachesvc-message", os.MFD_CLOEXEC), "r+b") as body:
        body.write(data)
        body.flush()
        socket.send_fds(channel, [BODY_IN_MEMFD], [*descriptors, body.fileno()])


class Receiver(Generic[_Message]):
    """Receives the messages of one channel, given their type, perhaps a tagged union."""

    def __init__(self, messages: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[_Message] = msgspec.msgpack.Decoder(messages)

    def __call__(self, channel: socket.socket) -> tuple[_Message, list[int]] | None:
        """Receive the next message and its descriptors, which are the caller's and close on exec; None when the other
        process has ended. Raises one of `RECEIVE_ERRORS`, and closes the descriptors of an invalid message."""
        data, descriptors, _, _ = socket.recv_fds(
            channel, MAX_DATAGRAM_BYTES, MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
        )
        if not data:
            return None
        try:
            if data == BODY_IN_MEMFD:
                with os.fdopen(descriptors.pop(), "rb") as body:
                    body.seek(0)
                    data = body.read(MAX_BODY_BYTES)
            return self._decoder.decode(data), descriptors
        except RecursionError:
            _close(descriptors)
            raise ValueError("a message is nested too deeply") from None
        except BaseException:
            _close(descriptors)
            raise

    def until_end(self, channel: socket.socket) -> tuple[_Message | None, list[int]]:
        """Receive as a call does; None, without descriptors, when the other process has ended or its message is invalid."""
        try:
            return self(channel) or (None, [])
        except RECEIVE_ERRORS:
            return None, []


def _close(descriptors: list[int]) -> None:
    for fd in descriptors:
        os.close(fd)
