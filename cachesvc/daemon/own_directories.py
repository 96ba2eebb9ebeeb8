"""The state directory and the daemon's sockets: made at the start, and again where a cleaner of temporary files or a
logout removed them under a running daemon."""

from __future__ import annotations

import errno
import logging
import os
import tempfile
import threading
from pathlib import Path

from cachesvc.config import STATE_BYTES, Settings
from cachesvc.core.errors import CacheError, NotAllowed, OutOfSpace
from cachesvc.daemon.control.server import ControlServer
from cachesvc.daemon.grants.server import GrantsServer
from cachesvc.daemon.loop.loop import Loop

log = logging.getLogger(__name__)
LOOK_S = 1.0


class OwnDirectories:
    """Looks every `LOOK_S` seconds, on a thread of its own, since the disks of the directories may hang."""

    def __init__(
        self,
        settings: Settings,
        loop: Loop,
        grants: GrantsServer,
        control: ControlServer,
    ) -> None:
        self._settings, self._loop = settings, loop
        self._grants, self._control = grants, control
        self._said = ""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="directories", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop looking. A directory that hangs is not waited for."""
        self._ended.set()
        self._thread.join(1.0)

    def _run(self) -> None:
        while not self._ended.wait(LOOK_S):
            try:
                self._look()
                self._said = ""
            except (CacheError, OSError) as error:
                if str(error) != self._said and not self._loop.ended:
                    self._said = str(error)
                    log.error("a directory of this daemon was removed", extra={"error": self._said})

    def _look(self) -> None:
        if not all(map(os.path.isdir, _state_folders(self._settings.state_dir))):
            make_state_dir(self._settings.state_dir)
            log.warning(
                "the state directory was removed and is made again; pin again what is to stay pinned",
                extra={"state_dir": self._settings.state_dir},
            )
        directory = self._settings.socket_dir
        if not os.path.isdir(directory):  # the parent makes it again
            return
        again = False
        if not self._grants.is_in_place():
            self._loop.call(self._grants.bind_again)
            again = True
        if not self._control.is_in_place():
            self._control.start_again()
            again = True
        if again:
            log.warning("the sockets were removed and are made again", extra={"socket": directory})


def _state_folders(directory: str) -> tuple[str, str]:
    """Return the folders of a state directory. They name the data of all users, and are this user's alone."""
    return f"{directory}/catalogs", f"{directory}/metadata"


def make_state_dir(directory: str) -> None:
    """Make the state directory. Raises NotAllowed or OutOfSpace where it cannot hold catalogs and metadata."""
    try:
        for private in _state_folders(directory):
            Path(private).mkdir(parents=True, exist_ok=True)
            os.chmod(private, 0o700)
        with tempfile.TemporaryFile(dir=directory) as probe:
            os.posix_fallocate(probe.fileno(), 0, STATE_BYTES)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        where = error.filename if isinstance(error, FileExistsError) else directory
        change = f"free {STATE_BYTES >> 20} MiB there" if full else "give it to the daemon's user, writable"
        raise (OutOfSpace if full else NotAllowed)(
            f"{where} cannot hold the daemon's state ({error.strerror}); {change}, or give --state-dir another"
            " directory"
        ) from None
