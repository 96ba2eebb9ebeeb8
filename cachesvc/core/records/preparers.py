"""Preparers: processes of jobs that make the bytes of prepared extents, and the node's slots for their work."""

from __future__ import annotations

from cachesvc.core.events import PreparerJoined, PreparerStalled
from cachesvc.core.model import DatasetId, ReaderId
from cachesvc.core.records.residency import CacheEntry


class Preparers:
    """Preparers by dataset. Each prepares one extent at a time, and all together at most `slots`."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._able: dict[DatasetId, dict[ReaderId, None]] = {}
        """The preparers that get work, the one that worked last at the end."""
        self._datasets: dict[ReaderId, DatasetId] = {}
        self.working: set[ReaderId] = set()

    def joined(self, event: PreparerJoined) -> None:
        """Add a preparer, or one that stalled before."""
        self._datasets[event.preparer] = event.dataset
        self._able.setdefault(event.dataset, {})[event.preparer] = None

    def stalled(self, event: PreparerStalled) -> None:
        """Give a preparer no more work until it joins again."""
        self.leave(event.preparer)

    def leave(self, preparer: ReaderId) -> bool:
        """Give a preparer no more work; return whether it was one. Its fill under way ends with its own event."""
        dataset = self._datasets.pop(preparer, None)
        if dataset is None:
            return False
        del self._able[dataset][preparer]
        if not self._able[dataset]:
            del self._able[dataset]
        return True

    def any_for(self, entry: CacheEntry) -> bool:
        """Return whether some preparer, idle or at work, can prepare an extent."""
        return any(dataset.id in self._able for dataset in entry.datasets)

    def idle_for(self, entry: CacheEntry) -> ReaderId | None:
        """The idle preparer of an extent that waits for work longest; None where there is none, or no slot."""
        if len(self.working) >= self._slots:
            return None
        able = (preparer for dataset in entry.datasets for preparer in self._able.get(dataset.id, ()))
        return next((preparer for preparer in able if preparer not in self.working), None)

    def begin(self, preparer: ReaderId) -> None:
        """Note that a preparer works."""
        assert preparer not in self.working, "two extents at a time"
        self.working.add(preparer)
        able = self._able[self._datasets[preparer]]
        del able[preparer]
        able[preparer] = None

    def end(self, preparer: ReaderId) -> None:
        """Note that the work of a preparer has ended."""
        self.working.remove(preparer)
