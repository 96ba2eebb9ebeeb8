"""Remembers which reads failed, to tell a lasting fault from a transient one."""

from __future__ import annotations

import threading

_MOST = 1 << 12


class RepeatedFaults:
    """Reads whose last response was complete and wrong. Once may be transient; twice in a row lasts. Thread-safe."""

    def __init__(self) -> None:
        self._failed: set[tuple[str, int]] = set()
        self._lock = threading.Lock()

    def failed(self, uri: str, offset: int) -> bool:
        """Note a wrong response. Tell whether the previous read at that offset was wrong too."""
        with self._lock:
            again = (uri, offset) in self._failed
            if len(self._failed) >= _MOST:
                self._failed.clear()
            self._failed.add((uri, offset))
        return again

    def succeeded(self, uri: str, offset: int) -> None:
        """Note a right response."""
        if self._failed:
            with self._lock:
                self._failed.discard((uri, offset))
