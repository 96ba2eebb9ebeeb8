"""The copies that the parent holds, and the state in which it hands them to the program that it becomes."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator, Sequence

import msgspec

from cachesvc.core.model import ExtentId
from cachesvc.daemon.parent.messages import COPIES_AT_ONCE, DIGESTS_AT_ONCE, CopyHeld, Release


class HeldCopies:
    """Owns a descriptor for each copy, which keeps its memory."""

    def __init__(self) -> None:
        self._copies: dict[ExtentId, tuple[CopyHeld, int]] = {}

    def __len__(self) -> int:
        return len(self._copies)

    def __iter__(self) -> Iterator[tuple[CopyHeld, int]]:
        """The copies with their descriptors, those filled first at the beginning."""
        return iter(self._copies.values())

    def hold(self, copy: CopyHeld, fd: int) -> None:
        """Hold a copy, in place of an earlier one of its extent. `fd` is owned from here on."""
        self.drop(copy.extent)
        self._copies[copy.extent] = copy, fd

    def drop(self, extent: ExtentId) -> None:
        """Release a copy, if it is held."""
        found = self._copies.pop(extent, None)
        if found is not None:
            os.close(found[1])

    def shed(self, size_bytes: int) -> int:
        """Release the copies that were filled first, until they made `size_bytes`; return their bytes."""
        freed = 0
        while self._copies and freed < size_bytes:
            copy, _ = next(iter(self._copies.values()))
            self.drop(copy.extent)
            freed += copy.size_bytes
        return freed

    def batches(self) -> Iterator[list[tuple[CopyHeld, int]]]:
        """Yield all copies, those filled last first, in batches that fit a message. Descriptors stay owned here."""
        batch: list[tuple[CopyHeld, int]] = []
        digests = 0
        for copy, fd in reversed(list(self._copies.values())):
            if batch and (len(batch) == COPIES_AT_ONCE or digests + len(copy.digests) > DIGESTS_AT_ONCE):
                yield batch
                batch, digests = [], 0
            batch.append((copy, fd))
            digests += len(copy.digests)
        if batch:
            yield batch


class ParentState(msgspec.Struct, frozen=True):
    """The state that a parent keeps when it becomes another program. Numbers of descriptors stay valid."""

    releases: list[Release]
    """The new release, and the one before it."""
    copies: list[tuple[CopyHeld, int]]
    lock: int
    listener: int
    daemon: tuple[int, int]
    """The pid of the daemon that is about to serve, and the channel to it."""
    asked_by: int
    """The connection of the request for the upgrade."""


def become(state: ParentState, blocked: Sequence[signal.Signals]) -> None:
    """Run the new release's program in this process, which keeps its number and the descriptors of `state`. The signals
    `blocked` wait until that handles them. Raises OSError where the program cannot be run, and changes nothing."""
    program = state.releases[0].program
    kept = [state.lock, state.listener, state.daemon[1], state.asked_by, *(fd for _, fd in state.copies)]
    memory = os.memfd_create("cachesvc-parent", 0)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    try:
        with os.fdopen(os.dup(memory), "wb") as body:
            body.write(msgspec.msgpack.encode(state))
        for fd in kept:
            os.set_inheritable(fd, True)
        os.chdir(program.directory)
        command = [program.executable, "-m", "cachesvc.daemon.parent", str(memory)]
        os.execve(command[0], command, program.environment)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for fd in kept:
            os.set_inheritable(fd, False)
        os.close(memory)


def left_state(memory: int) -> ParentState:
    """Read what `become` left, and close the descriptor."""
    with os.fdopen(memory, "rb") as body:
        body.seek(0)
        return msgspec.msgpack.decode(body.read(), type=ParentState)


def adopted(fd: int) -> socket.socket:
    """Return the socket of a descriptor that `become` left; processes that this one starts do not inherit it."""
    os.set_inheritable(fd, False)
    return socket.socket(fileno=fd)
