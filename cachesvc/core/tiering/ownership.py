"""Marks the extents that this node owns, by its latest view of the cluster."""

from __future__ import annotations

from collections.abc import Sequence

from cachesvc.core.placement.view import View
from cachesvc.core.records.cache_entry import CacheEntry
from cachesvc.core.tiering.shares import Shares


class Ownership:
    """Marks entries as owned or not. A node that is alone owns everything."""

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._view: View | None = None

    @property
    def shared(self) -> bool:
        """The cluster has other members."""
        return self._view is not None and not self._view.alone

    def set(self, view: View) -> bool:
        """Take another view; return whether owners may have changed."""
        former, self._view = self._view, view
        return former is None or former.placement() != view.placement()

    def mark(self, entries: Sequence[CacheEntry]) -> None:
        """Bring the entries' `owned` up to date. O(entries x members)."""
        if self._view is None or self._view.alone:
            every = [True] * len(entries)
        else:
            every = self._view.owned([entry.id for entry in entries])
        for entry, owned in zip(entries, every, strict=True):
            self._shares.set_owned(entry, owned)

    def turn(self, count: int) -> int:
        """The index of `count` at which this node begins, so that members that fetch the same extents begin at different
        ones."""
        if self._view is None:
            return 0
        names = self._view.names
        return count * names.index(self._view.me) // len(names)
