"""The state that a parent keeps when it becomes another program."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Sequence

import msgspec

from cachesvc.daemon.parent.messages import CopyHeld, Release


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
