"""A small JSON object in the state directory, which outlives the daemon."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cachesvc.system.descriptors import closing_fd
from cachesvc.tiers.directory import sync_directory

log = logging.getLogger(__name__)


class StateFile:
    """Safe from any thread, and from daemons that share the state directory."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._lock = threading.Lock()

    def read(self) -> dict[str, Any]:
        """Return the object; an empty one where there is no file, or none with an object, which is logged. Raises OSError
        where the file cannot be read; it must not be rewritten then."""
        try:
            with open(self.path, encoding="utf-8") as file:
                found = json.load(file)
        except FileNotFoundError:
            return {}
        except ValueError as error:
            log.warning(
                "a file of the state directory cannot be read, and what it kept is lost",
                extra={"file": self.path, "error": str(error)},
            )
            return {}
        return found if isinstance(found, dict) else {}

    @contextmanager
    def changed(self) -> Iterator[dict[str, Any]]:
        """Give the object to change, and write it at the end. Raises OSError."""
        with self._lock, _locked(os.path.dirname(self.path)):
            before = self.read()
            yield (found := dict(before))
            if found == before and list(found) == list(before):
                return
            with open(f"{self.path}.new", "w", encoding="utf-8") as file:
                json.dump(found, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(f"{self.path}.new", self.path)
            sync_directory(Path(self.path).parent, os.fsync)


@contextmanager
def _locked(directory: str) -> Iterator[None]:
    """Hold the lock of a state directory: daemons that share it rewrite its files one after the other. Raises OSError."""
    with closing_fd(os.open(directory, os.O_RDONLY | os.O_CLOEXEC)) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
