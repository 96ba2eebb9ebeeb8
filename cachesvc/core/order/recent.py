"""Keeps the latest few values that are costly to make: runs of epochs, windows of documents."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Latest(Generic[K, V]):
    """The values of the last `count` keys for which one was made. Threads may share it: the dictionary is replaced, never
    changed."""

    __slots__ = ("_count", "_kept")

    def __init__(self, count: int) -> None:
        self._count = count
        self._kept: dict[K, V] = {}

    def get(self, key: K, make: Callable[[K], V]) -> V:
        """The value of a key, made where it is not kept."""
        kept = self._kept
        if key not in kept:
            kept = {**dict([*kept.items()][1 - self._count :]), key: make(key)}
            self._kept = kept
        return kept[key]
