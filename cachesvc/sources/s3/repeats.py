"""Remembers which reads went wrong, to tell a lasting fault from a passing one."""

from __future__ import annotations

import threading

_MOST = 1 << 12


class Repeats:
    """Reads whose last answer was whole and yet not right: once, that may pass; twice in a row, it stays. Thread-safe."""

    def __init__(self) -> None:
        self._wrong: set[tuple[str, int]] = set()
        self._lock = threading.Lock()

    def wrong(self, uri: str, offset: int) -> bool:
        """Tell whether the read of that offset went wrong the last time too."""
        with self._lock:
            again = (uri, offset) in self._wrong
            if len(self._wrong) >= _MOST:
                self._wrong.clear()
            self._wrong.add((uri, offset))
        return again

    def right(self, uri: str, offset: int) -> None:
        """That read went well."""
        if self._wrong:
            with self._lock:
                self._wrong.discard((uri, offset))
