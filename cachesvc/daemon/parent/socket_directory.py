"""The socket directory: locked by one service, and made again where a cleaner of temporary files removed it."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from cachesvc.config import CONTROL_SOCKET, GRANTS_SOCKET, PARENT_SOCKET, UPGRADING
from cachesvc.core.errors import InvalidInput, NotAllowed
from cachesvc.daemon.unix_sockets import bind, check_free, identity, remove

ENDS_S, RETRY_S = 2.0, 0.02
"""A daemon that was killed together with its parent holds the lock for a moment."""


class SocketDirectory:
    """Owns the directory's lock and the parent's socket. A daemon inherits the lock.

    A socket file alone cannot tell a live daemon from a dead one without a race.
    """

    def __init__(self, path: str, lock: int, listener: socket.socket) -> None:
        self.path, self.lock, self.listener = path, lock, listener
        self._socket = f"{path}/{PARENT_SOCKET}"
        self._file = identity(self._socket)
        self._mode = os.stat(path).st_mode & 0o7777

    @classmethod
    def claim(cls, path: str) -> SocketDirectory:
        """Make the directory, and lock it for this service. Raises InvalidInput where another one uses it or the path of a
        socket is in use, NotAllowed where it cannot hold sockets."""
        lock = _locked(path, time.monotonic() + ENDS_S)
        for name in (CONTROL_SOCKET, GRANTS_SOCKET, PARENT_SOCKET):
            check_free(f"{path}/{name}")
        return cls(path, lock, bind(f"{path}/{PARENT_SOCKET}", 0o600))

    def made_again(self) -> bool:
        """Make what was removed again, and listen there; tell whether anything was. `listener` is another one then, and the
        one before is the caller's. Raises as `claim`, where another service uses the directory by now."""
        locked = self._is_locked()
        if locked and identity(self._socket) == self._file:
            return False
        if not locked:
            made = not os.path.isdir(self.path)
            lock = _locked(self.path, 0.0)
            if made:
                os.chmod(self.path, self._mode)
            os.dup2(lock, self.lock, inheritable=False)
            os.close(lock)
        self.listener = bind(self._socket, 0o600)
        self._file = identity(self._socket)
        return True

    def announce_upgrade(self) -> None:
        """Tell readers to wait for the daemon instead of reading around it."""
        with suppress(OSError):
            flags = os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC
            os.close(os.open(f"{self.path}/{UPGRADING}", flags, 0o644))

    def end_announcement(self) -> None:
        """Tell readers that the daemon serves, or that it is not waited for."""
        with suppress(OSError):
            os.unlink(f"{self.path}/{UPGRADING}")

    def close(self) -> None:
        """Remove the parent's socket. The lock ends with this process."""
        self.end_announcement()
        self.listener.close()
        remove(self._socket, self._file)

    def _is_locked(self) -> bool:
        """Tell whether the file that this service has locked is still the directory's."""
        try:
            return os.path.samestat(os.stat(f"{self.path}/lock"), os.fstat(self.lock))
        except (FileNotFoundError, NotADirectoryError):
            return False


def _locked(directory: str, deadline: float) -> int:
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        lock = os.open(f"{directory}/lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise NotAllowed(
            f"{directory} cannot hold the daemon's sockets ({error.strerror}); give --socket a directory of yours"
        ) from None
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            if time.monotonic() >= deadline:
                os.close(lock)
                raise InvalidInput(
                    f"a daemon already serves {directory}; stop it, or give --socket another directory. --takeover"
                    " replaces a daemon of release 0.3 or newer"
                ) from None
        time.sleep(RETRY_S)
