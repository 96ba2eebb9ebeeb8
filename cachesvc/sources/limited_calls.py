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

    def ends_within(self, seconds: float) -> bool:
        """Wait so long at most; tell whether it has ended."""
        return bool(wait([self._ended], max(0.0, seconds)).done)

    def result(self) -> _T:
        """Wait for the end. Return what the call returns, or raise what it raises."""
        return self._ended.result()

    def result_within(self, limit_s: float, late: Callable[[], SourceUnavailable]) -> _T:
        """Return what the call returns. Raises what it raises, and the error that `late` returns if the call has not ended
        `limit_s` seconds after it began. The call then goes on."""
        if not self.ends_within(limit_s - self.age_s):
            raise late()
        return self._ended.result()

    def _run(self) -> None:
        try:
            self._ended.set_result(self._call())
        except BaseException as error:  # noqa: BLE001
            self._ended.set_exception(error)


class SharedCalls(Generic[_T]):
    """Calls by key: threads that need the same one share it. Thread-safe."""

    def __init__(self, name: str) -> None:
        """`name`: of the threads."""
        self._name = name
        self._calls: dict[str, LimitedCall[_T]] = {}
        self._lock = threading.Lock()

    def __contains__(self, key: str) -> bool:
        return key in self._calls

    def of(self, key: str, limit_s: float, call: Callable[[], _T]) -> LimitedCall[_T]:
        """Return the call of this key, and begin one if there is none. A call that has run for twice its limit hangs, and
        one that ended after all its callers had given up is out of date: another one begins."""
        with self._lock:
            found = self._calls.get(key)
            if found is None or found.age_s > limit_s * (1 if found.ends_within(0) else 2):
                found = self._calls[key] = LimitedCall(call, self._name)
            return found

    def forget(self, key: str, call: LimitedCall[_T]) -> None:
        """Forget a call that has ended. One that still runs is kept, and so is another call of this key."""
        with self._lock:
            if call.ends_within(0) and self._calls.get(key) is call:
                del self._calls[key]
