"""Remembers which reads went wrong, to tell a lasting fault from a passing one."""

from __future__ import annotations

import threading

_MOST = 1 << 12


class RepeatedFaults:
    """Reads whose last answer was whole and yet not right: once, that may pass; twice in a row, it stays. Thread-safe."""

    def __init__(self) -> None:
        self._failed: set[tuple[str, int]] = set()
        self._lock = threading.Lock()

    def failed(self, uri: str, offset: int) -> bool:
        """Tell whether the read of that offset went wrong the last time too."""
        with self._lock:
            again = (uri, offset) in self._failed
            if len(self._failed) >= _MOST:
                self._failed.clear()
            self._failed.add((uri, offset))
        return again

    def succeeded(self, uri: str, offset: int) -> None:
        """That read went well."""
        if self._failed:
            with self._lock:
                self._failed.discard((uri, offset))
