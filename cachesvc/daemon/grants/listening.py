"""Unix sockets that readers and new daemons knock at: bound with their mode, and what is said to whom they turn away.
And whether the ports of a daemon are free, before anything of it is bound."""

from __future__ import annotations

import os
import socket
import stat
import struct
import time
from collections.abc import Iterable
from contextlib import ExitStack, suppress

from cachesvc.config import Settings
from cachesvc.core import wire
from cachesvc.core.errors import DaemonUnavailable, InvalidInput, NotAllowed
from cachesvc.core.wire import Op

BACKLOG = 1024
FREE_S, FREE_POLL_S = 3.0, 0.1
"""A daemon that was killed leaves its sharer for a moment, until that sees its channel's end."""
_CREDENTIALS = struct.Struct("3i")


def bind(path: str, mode: int) -> socket.socket:
    """A listening SEQPACKET socket. Raises as `make_room`."""
    make_room(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    before = os.umask(0o177)  # no moment at which others could connect
    try:
        listener.bind(path)
    finally:
        os.umask(before)
    os.chmod(path, mode)
    listener.listen(BACKLOG)
    listener.setblocking(False)
    return listener


def check_free(path: str, known: int | None = None) -> None:
    """Raises InvalidInput where no socket may be bound: `path` is no socket, or one at which a process other than
    `known` listens. A dead daemon's socket is nobody's."""
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
            if peer_process(probe)[0] == known:
                return
        except (ConnectionRefusedError, FileNotFoundError):
            return
        except OSError:
            pass  # another kind of socket, one with a full queue, or another user's: in use all the same
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


def addresses(settings: Settings) -> dict[str, str]:
    """HOST:PORT of each option that opens a port."""
    given = {"--listen": settings.listen, "--share": settings.share, "--metrics": settings.metrics}
    return {option: address for option, address in given.items() if address}


def check_addresses(settings: Settings, known: Iterable[str]) -> None:
    """Raises InvalidInput where a port cannot be bound. Ports of the `known` addresses will be free: a daemon that is
    taken over has them until it ends, and then it is too late to find out about another."""
    theirs = {_place(address)[1] for address in known}
    with ExitStack() as bound:
        for option, address in addresses(settings).items():
            if _place(address)[1] not in theirs:
                bound.enter_context(_bound(option, address))


def _place(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _bound(option: str, address: str) -> socket.socket:
    deadline = time.monotonic() + FREE_S
    while True:
        try:
            family, _, _, _, where = socket.getaddrinfo(*_place(address), type=socket.SOCK_STREAM)[0]
            return socket.create_server(where[:2], family=family)
        except (OSError, UnicodeError) as error:
            if time.monotonic() >= deadline:
                reason = getattr(error, "strerror", None) or error
                raise InvalidInput(
                    f"{option} {address} cannot be bound ({reason}); choose an address that is free"
                ) from None
        time.sleep(FREE_POLL_S)


def identity(path: str) -> tuple[int, int] | None:
    """Which file it is; None where there is none."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def remove(path: str, ours: tuple[int, int] | None) -> None:
    """Remove a socket file whose `identity` was `ours`, unless somebody has put another there."""
    if identity(path) == ours:
        with suppress(FileNotFoundError):
            os.unlink(path)


def peer_process(channel: socket.socket) -> tuple[int, int]:
    """The pid and uid at the other end: of whoever connected, or listened there."""
    found = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(found)
    return pid, uid


def turn_away(channel: socket.socket, why: str) -> None:
    """Say why a connection that has just been made ends: the client raises it."""
    text = f"{why}; close readers, or raise the limit (LimitNOFILE=, ulimit -Hn)"
    channel.setblocking(False)
    with suppress(OSError):
        channel.send(wire.encode(Op.FAILED, 0, 0, DaemonUnavailable.code, text=text))


def spare() -> int:
    """A descriptor to give up when no other is left."""
    return os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
