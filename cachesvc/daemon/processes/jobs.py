"""Messages between the daemon and its processes: one JSON datagram each, with descriptors beside it. Never pickled."""

from __future__ import annotations

import array
import base64
import json
import os
import socket
from dataclasses import asdict, dataclass, fields
from typing import ClassVar, TypeAlias, get_args

from cachesvc.daemon.peers.messages import OfPeers
from cachesvc.sources.resilient import SourceCounters

MAX_DATAGRAM_BYTES = 192 << 10
"""Under the kernel's default socket buffer; checksums of a 1 GiB extent are 175 KB in base64."""
MAX_BODY_BYTES = 256 << 20
"""The limit of a message in a memfd: 100,000 URIs of the longest kind."""
MAX_DESCRIPTORS = 4
JOBS_AT_ONCE = 16
"""Jobs that a process runs at a time. Fills are fewer; a build of minutes must not delay builds of other datasets."""
BODY_IN_MEMFD = b"+"
RECEIVE_ERRORS = (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError)
"""Errors of `receive` when the other process has ended or sent an invalid message."""


@dataclass(frozen=True, slots=True)
class FillJob:
    """Fill the target with extent `index` of a catalog, from the source. Descriptors: target, catalog, and, where peers
    may follow the fill (`shared`), its progress."""

    kind: ClassVar[str] = "fill"
    descriptors: ClassVar[int] = 2
    number: int
    dataset: str
    index: int
    shared: bool = False


@dataclass(frozen=True, slots=True)
class PullJob:
    """Fill the target with the blocks of an extent that its progress lacks, from the node at HOST:PORT `address`.
    Descriptors: target, progress."""

    kind: ClassVar[str] = "pull"
    descriptors: ClassVar[int] = 2
    number: int
    extent: str
    size_bytes: int
    address: str


@dataclass(frozen=True, slots=True)
class CopyJob:
    """Copy an extent from one tier to another, and verify it. Descriptors: target, origin."""

    kind: ClassVar[str] = "copy"
    descriptors: ClassVar[int] = 2
    number: int
    size_bytes: int
    digests: str


@dataclass(frozen=True, slots=True)
class VerifyJob:
    """Check an extent against its checksums. Descriptors: the extent."""

    kind: ClassVar[str] = "verify"
    descriptors: ClassVar[int] = 1
    number: int
    size_bytes: int
    digests: str


@dataclass(frozen=True, slots=True)
class BuildJob:
    """Resolve URIs to a dataset version and build its catalog in `catalogs` unless it is there. `version`: the one that is
    wanted; nothing is asked of the source if its catalog is there."""

    kind: ClassVar[str] = "build"
    descriptors: ClassVar[int] = 0
    number: int
    uris: list[str]
    options: dict[str, str | int]
    catalogs: str
    refresh: bool
    version: str = ""


@dataclass(frozen=True, slots=True)
class BuildProgress:
    """The bytes that a build has read so far, and all that it will read."""

    kind: ClassVar[str] = "progress"
    number: int
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class JobDone:
    """The end of a job.

    `code` is 0 for success, else a code of `core/errors.py` with a `message` of one line. `lost`: the process ended
    without an answer. `crashed`: a signal of its own code ended it (an abort, a segmentation fault) while it had
    this job alone. `from_peer`: the last bytes came from another node, and none from the source. `holes`: ranges of
    objects that a successful fill left out, in the format of grants; `hole_code` and `message` are the error of the
    first. `listed_at`: a build whose source is down opened the version that was the source's then, in seconds of Unix time,
    and `message` says why; `before`: the versions before it that could be opened too, separated by spaces.
    """

    kind: ClassVar[str] = "done"
    number: int
    code: int = 0
    message: str = ""
    retry: bool = False
    digests: str = ""
    source_bytes: int = 0
    peer_bytes: int = 0
    from_peer: bool = False
    dataset: str = ""
    lost: bool = False
    crashed: bool = False
    holes: str = ""
    hole_code: int = 0
    listed_at: int = 0
    before: str = ""


@dataclass(slots=True)
class SourceRequests(SourceCounters):
    """The requests that the process sent to sources since its last such message."""

    kind: ClassVar[str] = "source requests"


@dataclass(frozen=True, slots=True)
class ForkChild:
    """Tell the fork server to fork a process. Descriptors: the channel of that process."""

    kind: ClassVar[str] = "fork child"
    number: int


@dataclass(frozen=True, slots=True)
class KillChild:
    """Tell the fork server to kill a process."""

    kind: ClassVar[str] = "kill child"
    number: int


@dataclass(frozen=True, slots=True)
class ChildStarted:
    """The forked process runs."""

    kind: ClassVar[str] = "child started"
    number: int
    pid: int


@dataclass(frozen=True, slots=True)
class ChildEnded:
    """The forked process ended, or could not be forked. `code` is its exit code as in subprocess."""

    kind: ClassVar[str] = "child ended"
    number: int
    code: int


Job: TypeAlias = FillJob | PullJob | CopyJob | VerifyJob | BuildJob
Answer: TypeAlias = BuildProgress | JobDone
_OfFillers: TypeAlias = Job | Answer | SourceRequests
_OfForkServer: TypeAlias = ForkChild | KillChild | ChildStarted | ChildEnded
Message: TypeAlias = _OfFillers | _OfForkServer | OfPeers
_KINDS = {kind.kind: kind for kind in get_args(Message)}


def pack_digests(digests: bytes) -> str:
    """Checksums as text."""
    return base64.b64encode(digests).decode()


def unpack_digests(text: str) -> bytes:
    """The inverse of `pack_digests`."""
    return base64.b64decode(text)


def send(channel: socket.socket, message: Message, descriptors: tuple[int, ...] = ()) -> None:
    """Send one datagram with descriptors, which stay the caller's. Raises OSError.

    A message longer than a datagram, such as a build of thousands of URIs, travels in a memfd behind the descriptors.
    """
    data = json.dumps({"kind": message.kind, **asdict(message)}).encode()
    if len(data) <= MAX_DATAGRAM_BYTES:
        socket.send_fds(channel, [data], list(descriptors))
        return
    with os.fdopen(os.memfd_create("cachesvc-job", os.MFD_CLOEXEC), "r+b") as body:
        body.write(data)
        body.flush()
        socket.send_fds(channel, [BODY_IN_MEMFD], [*descriptors, body.fileno()])


def receive(channel: socket.socket) -> tuple[Message, list[int]] | None:
    """Receive the next message and its descriptors, which are the caller's and close on exec; None when the other
    process has ended. Raises one of `RECEIVE_ERRORS`."""
    room = socket.CMSG_LEN(MAX_DESCRIPTORS * array.array("i").itemsize)
    data, ancillary, _, _ = channel.recvmsg(MAX_DATAGRAM_BYTES, room, socket.MSG_CMSG_CLOEXEC)
    if not data:
        return None
    descriptors = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(payload)
    if data == BODY_IN_MEMFD:
        with os.fdopen(descriptors.pop(), "rb") as body:
            body.seek(0)
            data = body.read(MAX_BODY_BYTES)
    try:
        found = json.loads(data)
    except RecursionError:
        raise ValueError("a message is nested too deeply") from None
    return _KINDS[found.pop("kind")](**found), list(descriptors)


def is_well_typed(message: Message) -> bool:
    """Tell whether the fields have their declared types: the sending process reads untrusted data."""
    wanted = {"int": int, "str": str, "bool": bool}
    return all(type(getattr(message, each.name)) is wanted.get(str(each.type)) for each in fields(message))
