"""Reloads the settings: on SIGHUP, on a call, and when a file changes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from cachesvc.config import Settings, check_ram, validate
from cachesvc.core.errors import CacheError
from cachesvc.daemon.events.event import Event, failed, record
from cachesvc.daemon.reload.changes import Changes, compare
from cachesvc.daemon.reload.resolving import marks, resolve
from cachesvc.system.memory import allowed_bytes

log = logging.getLogger(__name__)
LOOK_S = 1.0
"""How often the files are looked at. A file that changed is read when it has been the same for as long, since an editor
may write it in parts."""


class Reloader:
    """Runs on a thread of its own, and on those of calls."""

    def __init__(self, settings: Settings, take: Callable[[Changes], None], stale: bool) -> None:
        """`take` changes the parts of the daemon, or raises CacheError and changes none. `stale`: the settings may be older
        than the files, since a daemon that died is replaced by one with the settings of the service's start."""
        self.settings = settings
        self.succeeded = True
        self.succeeded_at = time.time()
        self._take, self._stale = take, stale
        self._lock = threading.Lock()
        self._ended, self._asked = False, threading.Event()
        self._thread = threading.Thread(target=self._run, name="reload", daemon=True)

    def start(self) -> None:
        """Look at the files from now on."""
        if self.settings.origin is not None:
            self._thread.start()

    def close(self) -> None:
        """Stop looking. A reload under way is not waited for."""
        self._ended = True
        self._asked.set()

    def ask(self) -> None:
        """Have the settings reloaded soon; safe in a signal handler."""
        self._asked.set()

    def reload(self) -> Changes:
        """Reload the settings and return what changed. Raises CacheError, and changes nothing, where they are wrong."""
        with self._lock:
            try:
                changes = self._reloaded()
            except CacheError as error:
                self.succeeded = False
                record(failed("reload_failed", error))
                raise
            self.succeeded, self.succeeded_at = True, time.time()
            return changes

    def _reloaded(self) -> Changes:
        if self.settings.origin is None:
            raise CacheError(
                "this daemon was not started by a command line, so its settings cannot be read again"
            )
        wanted = resolve(self.settings.origin)
        validate(wanted)
        check_ram(wanted.ram_bytes, allowed_bytes())
        changes = compare(self.settings, wanted)
        if changes.taken:
            self._take(changes)
            self.settings = changes.settings
        record(Event("reloaded", why=text(changes)))
        return changes

    def _run(self) -> None:
        origin = self.settings.origin
        assert origin is not None
        read = before = marks(origin)
        if self._stale:
            self._asked.set()
        while True:
            asked = self._asked.wait(LOOK_S)
            self._asked.clear()
            if self._ended:
                return
            seen = marks(origin)
            if asked or (seen == before and seen != read):
                read = seen
                self._try()
            before = seen

    def _try(self) -> None:
        try:
            self.reload()
        except CacheError:
            pass  # it is recorded
        except Exception:
            log.exception("a reload failed unexpectedly")


def text(changes: Changes) -> str:
    """Return a line about a reload for people."""
    said = [f"{', '.join(changes.taken)} changed" if changes.taken else "nothing changed"]
    if changes.waiting:
        said.append(f"{', '.join(changes.waiting)} will change when the service is started again")
    return "; ".join(said)
