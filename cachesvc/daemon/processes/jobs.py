"""What the daemon asks of its processes, and what they answer: one JSON datagram each, descriptors
beside it. Never pickled."""

from __future__ import annotations

import array
import base64
import json
import os
import socket
from dataclasses import asdict, dataclass, fields
from typing import ClassVar, TypeAlias, get_args

from cachesvc.sources.resilient import SourceCounters

MAX_DATAGRAM_BYTES = 192 << 10
"""Under the kernel's default socket buffer; checksums of a 1 GiB extent are 175 KB in base64."""
MAX_BODY_BYTES = 256 << 20
"""Of a message in a memfd: 100,000 URIs of the longest kind."""
MAX_DESCRIPTORS = 4
SIDE_BY_SIDE = 16
"""Jobs that a process works at: fills are fewer, builds of other datasets must not wait for one that takes minutes."""
IN_MEMFD = b"+"
NONSENSE = (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError)
"""What `receive` raises where the other side is gone, or sent what is no message."""


@dataclass(frozen=True, slots=True)
class Fill:
    """Fill the target descriptor with extent `index` of a catalog. Descriptors: target, catalog."""

    kind: ClassVar[str] = "fill"
    descriptors: ClassVar[int] = 2
    number: int
    dataset: str
    index: int


@dataclass(frozen=True, slots=True)
class Copy:
    """Bring an extent from one tier to another, verified on the way. Descriptors: target, origin."""

    kind: ClassVar[str] = "copy"
    descriptors: ClassVar[int] = 2
    number: int
    size_bytes: int
    digests: str


@dataclass(frozen=True, slots=True)
class Verify:
    """Check an extent against its checksums. Descriptors: the extent."""

    kind: ClassVar[str] = "verify"
    descriptors: ClassVar[int] = 1
    number: int
    size_bytes: int
    digests: str


@dataclass(frozen=True, slots=True)
class Build:
    """Resolve URIs to a dataset version and build its catalog in `catalogs` unless it is there."""

    kind: ClassVar[str] = "build"
    descriptors: ClassVar[int] = 0
    number: int
    uris: list[str]
    options: dict[str, str | int]
    catalogs: str
    refresh: bool


@dataclass(frozen=True, slots=True)
class Progress:
    """A build has read so much of so much."""

    kind: ClassVar[str] = "progress"
    number: int
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Done:
    """A job's end. `code` 0 is success; otherwise it is of core/errors.py and `message` is one line. `lost`: the
    process that had the job ended without a word. `holes`: what a fill that succeeded had to leave out, as grants have it;
    `hole_code` and `message` say why the first of it is missing."""

    kind: ClassVar[str] = "done"
    number: int
    code: int = 0
    message: str = ""
    retry: bool = False
    digests: str = ""
    source_bytes: int = 0
    peer_bytes: int = 0
    dataset: str = ""
    lost: bool = False
    holes: str = ""
    hole_code: int = 0


@dataclass(slots=True)
class Asked(SourceCounters):
    """What the process asked of its sources since it last said so."""

    kind: ClassVar[str] = "asked"


@dataclass(frozen=True, slots=True)
class LeftAlone:
    """A peer did not answer, or sent nonsense: the process asks it nothing for a while."""

    kind: ClassVar[str] = "left alone"
    peer: str


@dataclass(frozen=True, slots=True)
class Fork:
    """The daemon asks for one more process. Descriptors: its channel."""

    kind: ClassVar[str] = "fork"
    number: int


@dataclass(frozen=True, slots=True)
class Kill:
    """The daemon asks for its end."""

    kind: ClassVar[str] = "kill"
    number: int


@dataclass(frozen=True, slots=True)
class Forked:
    """It has begun."""

    kind: ClassVar[str] = "forked"
    number: int
    pid: int


@dataclass(frozen=True, slots=True)
class Ended:
    """It has ended, with that exit code (as subprocess has it), or cannot begin."""

    kind: ClassVar[str] = "ended"
    number: int
    code: int


@dataclass(frozen=True, slots=True)
class Borrow:
    """The sharer asks for a descriptor of a resident extent."""

    kind: ClassVar[str] = "borrow"
    number: int
    extent: str


@dataclass(frozen=True, slots=True)
class Lent:
    """Its answer. Descriptors: the extent; none where it is not resident."""

    kind: ClassVar[str] = "lent"
    number: int
    size_bytes: int = 0
    digests: str = ""


@dataclass(frozen=True, slots=True)
class Sent:
    """The sharer has sent so much of what it borrowed under that number."""

    kind: ClassVar[str] = "sent"
    number: int
    size_bytes: int


Job: TypeAlias = Fill | Copy | Verify | Build
Answer: TypeAlias = Progress | Done
Message: TypeAlias = Job | Answer | Asked | LeftAlone | Fork | Kill | Forked | Ended | Borrow | Lent | Sent
_KINDS = {kind.kind: kind for kind in get_args(Message)}


def pack_digests(digests: bytes) -> str:
    """Checksums as text."""
    return base64.b64encode(digests).decode()


def unpack_digests(text: str) -> bytes:
    """The inverse of `pack_digests`."""
    return base64.b64decode(text)


def send(channel: socket.socket, message: Message, descriptors: tuple[int, ...] = ()) -> None:
    """One datagram with its descriptors; the sender keeps (and closes) its own copies. What is longer than a
    datagram (a build of thousands of URIs) travels in a memfd behind the descriptors."""
    data = json.dumps({"kind": message.kind, **asdict(message)}).encode()
    if len(data) <= MAX_DATAGRAM_BYTES:
        socket.send_fds(channel, [data], list(descriptors))
        return
    with os.fdopen(os.memfd_create("cachesvc-job", os.MFD_CLOEXEC), "r+b") as body:
        body.write(data)
        body.flush()
        socket.send_fds(channel, [IN_MEMFD], [*descriptors, body.fileno()])


def receive(channel: socket.socket) -> tuple[Message, list[int]] | None:
    """The next message and its descriptors (the receiver's own, close-on-exec), or None at the other
    side's end."""
    room = socket.CMSG_LEN(MAX_DESCRIPTORS * array.array("i").itemsize)
    data, ancillary, _, _ = channel.recvmsg(MAX_DATAGRAM_BYTES, room, socket.MSG_CMSG_CLOEXEC)
    if not data:
        return None
    descriptors = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(payload)
    if data == IN_MEMFD:
        with os.fdopen(descriptors.pop(), "rb") as body:
            body.seek(0)
            data = body.read(MAX_BODY_BYTES)
    try:
        found = json.loads(data)
    except RecursionError:
        raise ValueError("a message nested beyond sense") from None
    return _KINDS[found.pop("kind")](**found), list(descriptors)


def typed(message: Message) -> bool:
    """Whether a message holds what its types say: who sent it handles bytes that anybody may have written."""
    wanted = {"int": int, "str": str, "bool": bool}
    return all(type(getattr(message, each.name)) is wanted.get(str(each.type)) for each in fields(message))
