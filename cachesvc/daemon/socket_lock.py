"""The lock of the socket directory: at most one daemon serves it.

A socket file alone cannot tell a live daemon from a dead one without a race.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cachesvc.config import CONTROL_SOCKET, GRANTS_SOCKET
from cachesvc.core.errors import InvalidInput, NotAllowed
from cachesvc.daemon.grants.unix_sockets import check_free
from cachesvc.daemon.takeover.new_daemon import OldDaemon
from cachesvc.daemon.takeover.wire import SOCKET as TAKEOVER_SOCKET

log = logging.getLogger(__name__)
RETRY_S = 0.1


@contextmanager
def only_daemon(directory: str, old: OldDaemon | None, wait_s: float) -> Iterator[int]:
    """Hold the lock while the daemon runs, and yield its descriptor.

    A daemon that is taken over, `old`, shares its lock; any other daemon has `wait_s` seconds to end. Raises InvalidInput
    where another daemon serves the directory or a socket's path is in use, NotAllowed where it cannot hold sockets.
    """
    lock = _locked(directory, time.monotonic() + wait_s) if old is None else old.lock
    try:
        if old is None:
            for name in (CONTROL_SOCKET, GRANTS_SOCKET, TAKEOVER_SOCKET):
                check_free(f"{directory}/{name}")
        else:
            check_free(f"{directory}/{CONTROL_SOCKET}", old.pid)  # the other sockets are handed over
        yield lock
    finally:
        os.close(lock)


def lock_again(directory: str, lock: int, mode: int) -> bool:
    """Make the directory and its lock again where they were removed under this daemon, and put them in the place of the
    descriptor `lock`; `mode` is the directory's. Tell whether they were.

    Raises as `only_daemon`, where another daemon serves the directory by now.
    """
    with suppress(FileNotFoundError, NotADirectoryError):
        if os.path.samestat(os.stat(f"{directory}/lock"), os.fstat(lock)):
            return False
    made = not os.path.isdir(directory)
    found = _locked(directory, 0.0)
    if made:
        os.chmod(directory, mode)
    os.dup2(found, lock, inheritable=False)
    os.close(found)
    return True


def _locked(directory: str, deadline: float) -> int:
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        lock = os.open(f"{directory}/lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise NotAllowed(
            f"{directory} cannot hold the daemon's sockets ({error.strerror}); give --socket a directory of yours"
        ) from None
    logged = False
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            if time.monotonic() >= deadline:
                os.close(lock)
                raise InvalidInput(
                    f"a daemon already serves {directory}; stop it, give --takeover, or give --socket another directory"
                ) from None
        if not logged:
            log.info("waiting for a daemon that is ending", extra={"socket": directory})
        logged = True
        time.sleep(RETRY_S)
