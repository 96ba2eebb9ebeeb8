"""Keeps the latest values that several threads compute from the same keys."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Latest(Generic[T]):
    """The latest two values by key: threads that make batches are one or more of them apart. Each value is made once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: deque[tuple[object, T]] = deque(maxlen=2)

    def get(self, key: object, make: Callable[[], T]) -> T:
        """Return the value of a key, made by `make` unless it is at hand."""
        with self._lock:
            for known, value in self._found:
                if known == key:
                    return value
            value = make()
            self._found.append((key, value))
            return value
