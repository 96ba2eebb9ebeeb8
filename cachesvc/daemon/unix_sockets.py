"""Binds and removes the Unix sockets at which readers and new daemons connect."""

from __future__ import annotations

import os
import socket
import stat
import struct
from contextlib import suppress

from cachesvc.core.errors import InvalidInput, NotAllowed

BACKLOG = 1024
_CREDENTIALS = struct.Struct("3i")


def bind(path: str, mode: int) -> socket.socket:
    """Return a listening SEQPACKET socket. Raises as `make_room`."""
    make_room(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    before = os.umask(0o177)  # others can never connect before the chmod
    try:
        listener.bind(path)
    finally:
        os.umask(before)
    os.chmod(path, mode)
    listener.listen(BACKLOG)
    listener.setblocking(False)
    return listener


def check_free(path: str) -> None:
    """Raise InvalidInput where no socket may be bound: `path` is no socket, or a process listens there. The socket of a
    dead daemon is free."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise InvalidInput(
            f"{path} is no socket, and one is to be there; remove it, or give --socket another directory"
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return
        except OSError:
            pass  # in use: another kind of socket, one with a full queue, or another user's
    raise InvalidInput(
        f"another process listens at {path}, or it is another user's; stop that, or give --socket another directory"
    )


def make_room(path: str) -> None:
    """Remove a dead daemon's socket. Raises InvalidInput as `check_free`, NotAllowed where it cannot be removed."""
    check_free(path)
    try:
        with suppress(FileNotFoundError):
            os.unlink(path)
    except PermissionError as error:
        raise NotAllowed(
            f"{path} cannot be removed ({error.strerror}); remove it, or give --socket another directory"
        ) from None


def identity(path: str) -> tuple[int, int] | None:
    """Return the device and inode of a file; None where there is none."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def remove(path: str, ours: tuple[int, int] | None) -> None:
    """Remove a socket file whose `identity` was `ours`, unless another file has replaced it."""
    if identity(path) == ours:
        with suppress(FileNotFoundError):
            os.unlink(path)


def peer_process(channel: socket.socket) -> tuple[int, int]:
    """Return the pid and uid of the process that connected, or listened, at the other end."""
    found = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(found)
    return pid, uid
