"""The operator's switch that has the readers of this node read from the source."""

from __future__ import annotations

import os
from pathlib import Path

from cachesvc.core.errors import CacheError
from cachesvc.tiers.directory import sync_directory

BYPASSED = "the operator bypasses the cache of this node, until `cachesvc bypass off`"


class Bypass:
    """A file keeps the switch across restarts. Safe from any thread."""

    def __init__(self, path: str) -> None:
        self._file = Path(path)
        self.on = self._file.exists()

    def set(self, on: bool) -> bool:
        """Set the switch; return whether it was set otherwise. Raises CacheError where that cannot be kept."""
        try:
            if on:
                self._file.touch()
            else:
                self._file.unlink(missing_ok=True)
            sync_directory(self._file.parent, os.fsync)
        except OSError as error:
            raise CacheError(f"{self._file}: {error.strerror}") from None
        before, self.on = self.on, on
        return before != on
