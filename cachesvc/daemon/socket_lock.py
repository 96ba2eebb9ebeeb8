"""The lock of the socket directory: at most one daemon serves it.

A socket file alone cannot tell a live daemon from a dead one without a race.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cachesvc.config import CONTROL_SOCKET, GRANTS_SOCKET
from cachesvc.core.errors import InvalidInput, NotAllowed
from cachesvc.daemon.grants.unix_sockets import check_free
from cachesvc.daemon.takeover.new_daemon import OldDaemon
from cachesvc.daemon.takeover.wire import SOCKET as TAKEOVER_SOCKET

log = logging.getLogger(__name__)
RETRY_S = 0.1


@contextmanager
def only_daemon(directory: str, before: OldDaemon | None, wait_s: float) -> Iterator[int]:
    """Hold the lock while the daemon runs. `before`, a daemon that is taken over from, shares its own lock; one that
    is ending gets `wait_s` to release it. Raises InvalidInput where another daemon serves the directory, or where a
    socket's path is in use, NotAllowed where the directory cannot hold sockets."""
    lock = _locked(directory, time.monotonic() + wait_s) if before is None else before.lock
    try:
        if before is None:
            for name in (CONTROL_SOCKET, GRANTS_SOCKET, TAKEOVER_SOCKET):
                check_free(f"{directory}/{name}")
        else:
            check_free(f"{directory}/{CONTROL_SOCKET}", before.pid)  # it hands the others over
        yield lock
    finally:
        os.close(lock)


def _locked(directory: str, deadline: float) -> int:
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        lock = os.open(f"{directory}/lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise NotAllowed(
            f"{directory} cannot hold the daemon's sockets ({error.strerror}); give --socket a directory of yours"
        ) from None
    told = False
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
        if not told:
            log.info("a daemon that is ending is waited for", extra={"socket": directory})
        told = True
        time.sleep(RETRY_S)
