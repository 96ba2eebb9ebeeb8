"""The protocol that moves blocks of extents between nodes: what a request and a frame look like.

A reader connects, sends requests one after another, and gets a sequence of frames for each. All numbers are little-endian.

request     magic, version, number of ranges, extent id; then (first block, count) of each wanted range
frame       kind, version, first block, count; then, by kind:
  BLOCKS      the digests of `count` blocks from `first`, then their bytes
  WAIT        nothing: the node is alive, and no wanted block is complete at the moment
  END         the digest of digests, and from version 2 on the extent's size in bytes: all wanted blocks were sent, and the
              extent is committed. `first block` and `count` are the maker, 0 for the node itself
  other kinds nothing: the request failed

A request without ranges asks for the END frame alone, for the size. After END and NOT_FOUND the connection takes the next
request; after another failure it is closed.

Two releases that follow one another speak the lower of their versions. A reader asks in its newest version. A node that
does not speak it answers VERSION with its own newest; the reader asks again in the lower of the two, and begins with that
from then on. Frames have the version of their request.
"""

from __future__ import annotations

import socket
import ssl
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import inf

from cachesvc.core.model import ExtentId
from cachesvc.tiers.fill_progress import ROOT_BYTES

MAGIC, VERSION = b"csvB", 2
OLDEST_VERSION = max(1, VERSION - 1)
"""The oldest version that is spoken."""
MAX_RANGES = 256
"""Ranges of a request; a reader that lacks more asks again for the others."""
FRAME_BLOCKS = 16
"""Blocks of a frame. 1 MiB costs 4 system calls, and takes 0.1 s on a link of 100 Mb/s."""
_OPENING = struct.Struct("<4sHH")
_ID = struct.Struct("<16s")
_RANGE = struct.Struct("<II")
_FRAME = struct.Struct("<BxHII")
_SIZE = struct.Struct("<Q")
_SIZED = 2
"""The first version whose END frame has the size."""
VERSIONS = range(OLDEST_VERSION, VERSION + 1)
"""The versions that this release speaks."""
Range = tuple[int, int]
"""(first block, count)."""


class Kind(IntEnum):
    """Kinds of frames."""

    BLOCKS = 1
    WAIT = 2
    END = 3
    ABORTED = 4
    """The fill of the extent failed."""
    NOT_FOUND = 5
    """The extent is neither resident nor being filled."""
    BUSY = 6
    """The node serves as many connections as it can."""
    INVALID = 7
    """The request makes no sense."""
    VERSION = 8
    """The node does not speak the version of the request; the one in this frame is its newest."""
    FAILED = 9
    """The node cannot read the extent."""


class ConnectionEnded(EOFError):
    """The other side closed the connection. `received_bytes`: what came before of what was to be received."""

    def __init__(self, received_bytes: int) -> None:
        super().__init__(f"the connection ended after {received_bytes} bytes of a message")
        self.received_bytes = received_bytes


class TooSlow(TimeoutError):
    """Bytes came, but not all of them in time."""


class RequestRefused(Exception):
    """The request is answered by a frame of the kind `answer`, and the connection is closed."""

    def __init__(self, answer: Kind) -> None:
        super().__init__(answer.name)
        self.answer = answer


@dataclass(frozen=True, slots=True)
class Request:
    """The blocks of one extent that a reader wants."""

    extent: ExtentId
    ranges: tuple[Range, ...]
    version: int = VERSION

    def pack(self) -> bytes:
        """Return the bytes to send."""
        assert len(self.ranges) <= MAX_RANGES, "too many ranges"
        opening = _OPENING.pack(MAGIC, self.version, len(self.ranges)) + _ID.pack(self.extent)
        return opening + b"".join(_RANGE.pack(*each) for each in self.ranges)


@dataclass(frozen=True, slots=True)
class Frame:
    """The head of a frame."""

    kind: Kind
    first: int = 0
    count: int = 0
    version: int = VERSION

    @staticmethod
    def end(maker: int) -> Frame:
        """The END frame of an extent with this maker."""
        return Frame(Kind.END, maker & 0xFFFFFFFF, maker >> 32)

    @property
    def maker(self) -> int:
        """The maker in an END frame."""
        return self.first | self.count << 32

    def pack(self) -> bytes:
        """Return the bytes to send."""
        return _FRAME.pack(self.kind, self.version, self.first, self.count)


def receive_request(connection: socket.socket, timeout_s: float, versions: range = VERSIONS) -> Request:
    """Receive a request in one of `versions`. Its beginning may take as long as the connection's own timeout, the rest
    `timeout_s`.

    Raises RequestRefused, ConnectionEnded, TimeoutError, OSError.
    """
    magic, version, count = _OPENING.unpack(receive(connection, _OPENING.size))
    if magic != MAGIC:
        raise RequestRefused(Kind.INVALID)
    if version not in versions:
        raise RequestRefused(Kind.VERSION)
    if count > MAX_RANGES:
        raise RequestRefused(Kind.INVALID)
    rest = receive(connection, _ID.size + count * _RANGE.size, time.monotonic() + timeout_s)
    (extent,) = _ID.unpack_from(rest)
    return Request(ExtentId(extent), tuple(_RANGE.iter_unpack(rest[_ID.size :])), version)


def receive_frame(connection: socket.socket) -> Frame:
    """Receive the head of a frame. Raises ValueError for an unknown kind, ConnectionEnded, TimeoutError, OSError."""
    kind, version, first, count = _FRAME.unpack(receive(connection, _FRAME.size))
    return Frame(Kind(kind), first, count, version)


def pack_end(root: bytes, size_bytes: int, version: int) -> bytes:
    """Return what follows the head of an END frame."""
    return root + _SIZE.pack(size_bytes) if version >= _SIZED else root


def receive_end(connection: socket.socket, version: int) -> tuple[bytes, int]:
    """Receive what follows the head of an END frame: the digest of digests, and the extent's size, which is 0 in a version
    that does not tell it. Raises as `receive_into`."""
    root = receive(connection, ROOT_BYTES)
    return root, _SIZE.unpack(receive(connection, _SIZE.size))[0] if version >= _SIZED else 0


def receive(connection: socket.socket, size_bytes: int, deadline_s: float = inf) -> bytes:
    """Receive exactly `size_bytes`. Raises as `receive_into`."""
    buffer = bytearray(size_bytes)
    with memoryview(buffer) as view:
        receive_into(connection, view, deadline_s)
    return bytes(buffer)


def receive_into(connection: socket.socket, view: memoryview, deadline_s: float = inf) -> None:
    """Receive until `view` is full.

    Raises ConnectionEnded; TimeoutError when no byte comes within the connection's timeout (`set_timeout`); TooSlow when
    the rest is missing at `deadline_s` of the monotonic clock; OSError.
    """
    flags = 0 if isinstance(connection, ssl.SSLSocket) else socket.MSG_WAITALL
    done = 0
    while done < len(view):
        try:
            with view[done:] as rest:
                count = connection.recv_into(rest, 0, flags)
        except BlockingIOError:
            raise TimeoutError("no byte came in time") from None
        if not count:
            raise ConnectionEnded(done)
        done += count
        if done < len(view) and time.monotonic() > deadline_s:
            raise TooSlow("the bytes came too slowly")


def set_timeout(connection: socket.socket, timeout_s: float, tls: bool) -> None:
    """Limit how long a call waits for the other side to send or take a byte, before TLS is set up on the connection.

    Without TLS the kernel keeps the time: Python's own timeout makes a socket nonblocking, and neither MSG_WAITALL nor
    sendfile waits then. The ssl module does not know the kernel's timeout.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.settimeout(timeout_s if tls else None)
    if not tls:
        whole, part = divmod(int(timeout_s * 1_000_000), 1_000_000)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            connection.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", whole, part))


def host_and_port(address: str) -> tuple[str, int]:
    """Split HOST:PORT; an IPv6 host may stand in brackets. Raises ValueError."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def within(ranges: Sequence[Range], blocks: int) -> bool:
    """Tell whether all ranges lie within an extent of so many blocks, in ascending order and apart from each other."""
    at = 0
    for first, count in ranges:
        if first < at or not count or first + count > blocks:
            return False
        at = first + count
    return True
