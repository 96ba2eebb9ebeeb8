"""Warns before the certificate of this node ends: 30, 7 and 1 day before, and once it has ended."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from cachesvc.config import Tls
from cachesvc.core.errors import InvalidInput
from cachesvc.core.placement.traits import certificate_stage
from cachesvc.daemon.access.certificate_end import certificate_end

log = logging.getLogger(__name__)
LOOK_S = 60.0
"""How often the file is read: a certificate may be replaced at any time."""


class CertificateWatch:
    """Reads the file on a thread of its own, since a disk may hang. `ends`: the end in seconds of Unix time; 0 before the
    first look, and where the file cannot be read."""

    def __init__(self, tls: Tls, now: Callable[[], float] = time.time) -> None:
        self._path, self._now = tls.certificate, now
        self._said: int | None = None
        self._closed = threading.Event()
        self.ends = 0

    def start(self) -> None:
        """Watch from now on, until `close`."""
        threading.Thread(target=self._run, name="certificate", daemon=True).start()

    def close(self) -> None:
        """End the watch."""
        self._closed.set()

    def look(self) -> None:
        """Read the file, and log a warning where a stage has begun since the last look."""
        try:
            self.ends = certificate_end(self._path)
        except (OSError, InvalidInput) as error:
            self.ends = 0
            log.warning("the certificate cannot be read", extra={"error": str(error)})
            return
        stage = certificate_stage(self.ends, self._now())
        if stage is not None and stage != self._said:
            log.warning(certificate_text(self.ends, self._now()), extra={"certificate": self._path})
        self._said = stage

    def _run(self) -> None:
        self.look()
        while not self._closed.wait(LOOK_S):
            self.look()


def certificate_text(ends: int, now: float) -> str:
    """Return when a certificate ends, and what to do, for people. Both times are seconds of Unix time."""
    day = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(ends))
    if ends <= now:
        return f"this node's certificate has expired at {day}: other nodes and clients refuse it; renew it"
    return f"this node's certificate ends at {day}, in {(ends - now) / 86_400:.1f} days; renew it"
