"""The footers of the files that this process decoded from lately: the next extent is often of the same file."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future

from cachesvc.core.model import ObjectVersion
from cachesvc.sources.parquet.parquet import FOOTER_BYTES, Footer

_MAX_FOOTERS = 64
_MAX_BYTES = FOOTER_BYTES
"""Limit of all footers together; a parsed one takes ten times its size."""


class Footers:
    """Footers by file, least recently used first. Thread-safe: a footer that several threads need is read once."""

    def __init__(self) -> None:
        self._found: OrderedDict[ObjectVersion, Future[Footer]] = OrderedDict()
        self._lock = threading.Lock()
        self._process = os.getpid()

    def of(self, version: ObjectVersion, load: Callable[[], bytes]) -> Footer:
        """Return a file's footer, parsed from what `load` returns unless it is known. Raises the errors of both."""
        if self._process != os.getpid():  # forked, perhaps while another thread held the lock
            self.__init__()  # type: ignore[misc]
        with self._lock:
            found = self._found.get(version)
            mine = found is None
            if found is None:
                found = self._found[version] = Future()
            self._found.move_to_end(version)
        if not mine:
            return found.result()
        try:
            footer = Footer(version.uri, load())
        except BaseException as error:
            with self._lock:
                self._found.pop(version, None)
            found.set_exception(error)
            raise
        found.set_result(footer)
        self._limit()
        return footer

    def forget(self) -> None:
        """Drop all footers."""
        with self._lock:
            self._found.clear()

    def _limit(self) -> None:
        with self._lock:
            done = [each for each, found in self._found.items() if found.done() and not found.exception()]
            size = sum(self._found[each].result().size_bytes for each in done)
            for each in done[:-1]:
                if len(self._found) <= _MAX_FOOTERS and size <= _MAX_BYTES:
                    return
                size -= self._found.pop(each).result().size_bytes


FOOTERS = Footers()
"""The footers of this process, for all its fetchers."""
