"""Calls of foreign code, which may hang: drivers, credential helpers, listings of a source that is down."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Generic, TypeVar

from cachesvc.core.errors import SourceUnavailable

_T = TypeVar("_T")


class LimitedCall(Generic[_T]):
    """A call on a thread of its own, which ends no process. Any number of threads may wait for it."""

    def __init__(self, call: Callable[[], _T], name: str) -> None:
        """Begin the call. `name`: of its thread. Raises RuntimeError where no thread can be started."""
        self._ended: Future[_T] = Future()
        self._call = call
        self._began_at = time.monotonic()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    @property
    def age_s(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self._began_at

    @property
    def failed(self) -> bool:
        """Whether it has ended with an error."""
        return self._ended.done() and self._ended.exception() is not None

    def ends_within(self, seconds: float) -> bool:
        """Wait so long at most; tell whether it has ended."""
        return bool(wait([self._ended], max(0.0, seconds)).done)

    def result(self, limit_s: float, late: str) -> _T:
        """Return what the call returns. Raises what it raises, and SourceUnavailable with the text `late` where it has not
        ended `limit_s` after it began; it goes on."""
        if not self.ends_within(limit_s - self.age_s):
            raise SourceUnavailable(late)
        return self._ended.result()

    def _run(self) -> None:
        try:
            self._ended.set_result(self._call())
        except BaseException as error:  # noqa: BLE001
            self._ended.set_exception(error)
