"""The messages between an old and a new daemon during a takeover.

Each is a datagram on a SOCK_SEQPACKET socket: one byte for its kind, then a message of takeover.proto.

    new                                old
    HELLO  protocol, version   ->
                               <-      OFFER  datasets or a refusal, and the socket directory's lock
    READY                      ->      ends its fills and stops its loop
                               <-      STATE  in a memfd
    GOT                        ->
                               <-      MORE   up to 128 descriptors; each answered by GOT
    ADOPTED                    ->      ends

Until ADOPTED the old daemon has lost nothing: when the new one dies or gives up, its connection closes, and the old one
goes on. After ADOPTED the old daemon never goes on.
"""

from __future__ import annotations

import array
import os
import socket
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Any

from google.protobuf.message import DecodeError

PROTOCOL = 2
SOCKET = "takeover.sock"
BATCH = 128
"""Descriptors in a datagram; the kernel allows 253. Each batch is answered, so no more are ever in flight."""
MAX_MESSAGE_BYTES = 64 << 10
"""The limit of a datagram; an OFFER of 1,000 datasets takes 34 KB."""
MAX_DATASETS = 1000


class MessageKind(IntEnum):
    """The first byte of a datagram."""

    HELLO = 1
    OFFER = 2
    READY = 3
    STATE = 4
    MORE = 5
    GOT = 6
    ADOPTED = 7


def send(
    channel: socket.socket, kind: MessageKind, message: Any = None, descriptors: Sequence[int] = ()
) -> None:
    """Send one datagram; the descriptors stay the caller's. Raises OSError."""
    body = message.SerializeToString() if message is not None else b""
    socket.send_fds(channel, [bytes([kind]) + body], list(descriptors))


def receive(channel: socket.socket, expected: MessageKind, into: Any = None) -> list[int]:
    """Parse the next datagram into the message `into`; return its descriptors, which are the caller's.

    Raises ConnectionError where the other daemon has closed the connection, TimeoutError, and ValueError for a datagram of
    another kind.
    """
    room = socket.CMSG_SPACE(BATCH * array.array("i").itemsize)
    data, ancillary, flags, _ = channel.recvmsg(MAX_MESSAGE_BYTES, room, socket.MSG_CMSG_CLOEXEC)
    found = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found.frombytes(payload)
    if data and data[0] == expected and not flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC):
        if into is not None:
            _parse(into, data[1:])
        return list(found)
    for fd in found:
        os.close(fd)
    if not data:
        raise ConnectionResetError("the other daemon closed the connection")
    if flags & socket.MSG_CTRUNC:
        raise ValueError("not all descriptors arrived: is the limit of open files too low?")
    raise ValueError(f"{expected.name} was expected, not {data[0]} in {len(data):,} bytes")


def send_state(channel: socket.socket, state: Any, descriptors: Iterator[int]) -> None:
    """Send STATE, then its descriptors in batches, which are closed once sent. Raises OSError, ValueError."""
    with os.fdopen(os.memfd_create("cachesvc-takeover", os.MFD_CLOEXEC), "r+b") as body:
        body.write(state.SerializeToString())
        body.flush()
        send(channel, MessageKind.STATE, None, [body.fileno()])
    receive(channel, MessageKind.GOT)
    while batch := [fd for _, fd in zip(range(BATCH), descriptors)]:
        try:
            send(channel, MessageKind.MORE, None, batch)
        finally:
            for fd in batch:
                os.close(fd)
        receive(channel, MessageKind.GOT)


def receive_state(channel: socket.socket, state: Any) -> list[int]:
    """Receive what `send_state` sends; return all descriptors, which are the caller's. Raises as `receive`, and closes
    them then."""
    (body_fd,) = receive(channel, MessageKind.STATE)
    with os.fdopen(body_fd, "rb") as body:
        body.seek(0)
        _parse(state, body.read())
    send(channel, MessageKind.GOT)
    expected = 1 + len(state.extents) + len(state.readers) + state.locks
    found: list[int] = []
    try:
        while len(found) < expected:
            found += receive(channel, MessageKind.MORE)
            send(channel, MessageKind.GOT)
    except (OSError, ValueError):
        for fd in found:
            os.close(fd)
        raise
    return found


def _parse(message: Any, data: bytes) -> None:
    try:
        message.MergeFromString(data)
    except DecodeError as error:
        raise ValueError(f"a message cannot be parsed: {error}") from None
