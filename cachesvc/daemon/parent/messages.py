"""Messages between the parent, the daemon and `serve --takeover`."""

from __future__ import annotations

import signal
from typing import TypeAlias

import msgspec

from cachesvc.core.errors import CacheError
from cachesvc.core.model import ExtentId
from cachesvc.daemon.processes.datagrams import MAX_DESCRIPTORS, Receiver

COPIES_AT_ONCE = MAX_DESCRIPTORS
DIGESTS_AT_ONCE = 128 << 10
"""The most copies, and bytes of digests after the first copy's, in one message."""


class CopyHeld(msgspec.Struct, frozen=True):
    """A sealed copy of an extent in RAM, with its checksums."""

    extent: ExtentId
    size_bytes: int
    digests: bytes


class HoldCopy(msgspec.Struct, frozen=True, tag=True):
    """Ask the parent to hold a copy. Descriptors: its memory."""

    copy: CopyHeld


class DropCopy(msgspec.Struct, frozen=True, tag=True):
    """Ask the parent to give up a copy; `CopyDropped` answers."""

    extent: ExtentId


class GiveCopies(msgspec.Struct, frozen=True, tag=True):
    """Ask the parent for more of what it holds; `CopiesHeld` answers, once no other daemon runs."""


class DaemonServes(msgspec.Struct, frozen=True, tag=True):
    """Tell the parent that the daemon's sockets are open."""


class StartFailed(msgspec.Struct, frozen=True, tag=True):
    """Tell the parent why the daemon ends: a code of `core/errors.py`, and its message."""

    code: int
    message: str


class CopyDropped(msgspec.Struct, frozen=True, tag=True):
    """Answer `DropCopy`: the parent does not hold the copy."""


class CopiesHeld(msgspec.Struct, frozen=True, tag=True):
    """Answer `GiveCopies`: the next copies, those filled last first; none after the last. Descriptors: their memory."""

    copies: tuple[CopyHeld, ...]


class Program(msgspec.Struct, frozen=True):
    """How a release is run: its interpreter, variables and working directory."""

    executable: str
    environment: dict[str, str]
    directory: str


class Release(msgspec.Struct, frozen=True):
    """A program and its `Settings` in JSON, which another release hands on and may not know all of."""

    program: Program
    settings: bytes


class UpgradeRequest(msgspec.Struct, frozen=True, tag=True):
    """Ask a running parent to become another release, or to take other settings."""

    protocol: int
    release: Release


class UpgradeAnswer(msgspec.Struct, frozen=True, tag=True):
    """Answer `UpgradeRequest`: `code` is 0 once the new daemon serves, else a code of `core/errors.py`."""

    code: int = 0
    message: str = ""

    @classmethod
    def of(cls, error: CacheError) -> UpgradeAnswer:
        """Return the answer of an upgrade that failed."""
        return cls(error.code, str(error))


class Given(msgspec.Struct, frozen=True):
    """The start arguments of the daemon's process: its settings, the pid of its parent, whether it replaces another
    daemon, and why that daemon ended if it was not to; "" otherwise."""

    settings: msgspec.Raw
    parent: int
    replaces: bool = False
    crash: str = ""


LEAVE = signal.SIGRTMIN
"""The signal that tells a daemon to end its fills and leave."""
PROTOCOL = 1
"""The version of `UpgradeRequest`, `UpgradeAnswer`, `ParentState` and `Given`, which two releases exchange."""
FromDaemon: TypeAlias = HoldCopy | DropCopy | GiveCopies | DaemonServes | StartFailed
ToDaemon: TypeAlias = CopyDropped | CopiesHeld
receive_from_daemon: Receiver[FromDaemon] = Receiver(FromDaemon)
receive_from_parent: Receiver[ToDaemon] = Receiver(ToDaemon)
receive_upgrade: Receiver[UpgradeRequest] = Receiver(UpgradeRequest)
receive_answer: Receiver[UpgradeAnswer] = Receiver(UpgradeAnswer)
