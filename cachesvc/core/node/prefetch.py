"""Fills without waiters: of datasets that a job wants whole, and of extents that were lost.

Lost extents go first. A prefetch fills its dataset in order. Several are served round robin, an extent each. An extent
that finds no room to be kept is counted as stuck and skipped. An extent that is evicted from one tier, say because the
RAM tier shrank, is filled again into another tier that has room.
"""

from __future__ import annotations

from cachesvc.core.errors import SourceUnavailable
from cachesvc.core.events import Prefetched
from cachesvc.core.lookahead.lookahead import FEED_LIMIT
from cachesvc.core.records.dataset_state import DatasetState
from cachesvc.core.records.incremental import IncrementalWork, WorkKind
from cachesvc.core.records.residency import CacheEntry
from cachesvc.core.tiering.copies import Copies
from cachesvc.core.tiering.fill_starts import FillStarts, Readiness
from cachesvc.core.tiering.policy import Requester

NOBODY_PREPARES = "no process prepares it any more; see its messages, and prepare again"


class Prefetches:
    """Starts the fills of prefetches and of lost extents, which it notes in `Copies.refills`."""

    def __init__(self, copies: Copies, work: IncrementalWork, starts: FillStarts) -> None:
        self._copies = copies
        self._starts = starts
        self._policy = copies.policy
        self._work = work
        self._fill_count = 0

    def begin(self, event: Prefetched) -> None:
        """Start a prefetch, from the beginning, of a dataset that the job has declared."""
        dataset = self._policy.shares.datasets.get(event.dataset)
        if dataset and event.job in dataset.jobs:
            dataset.prefetched, dataset.prefetch_at = True, 0
            dataset.prefetchers.add(event.job)
            dataset.failed.clear()
            dataset.stuck.clear()

    def leave(self, dataset: DatasetState, job: int) -> None:
        """End a job's part in a prefetch. One that is not done ends with the last job that asked for it."""
        if job in dataset.prefetchers:
            dataset.prefetchers.remove(job)
            dataset.prefetched &= bool(dataset.prefetchers) or dataset.done

    def end(self, dataset: DatasetState) -> None:
        """End the prefetch of a dataset."""
        dataset.prefetched = False

    def refill(self, entry: CacheEntry) -> None:
        """Fill a claimed extent again that was lost, if a plan or a prefetch wants it."""
        if entry.datasets:
            self.retry(entry)

    def retry(self, entry: CacheEntry) -> None:
        """Fill an extent again, if a plan or a prefetch wants it. The prefetch of a prepared dataset begins anew instead:
        an extent that waits for a preparer here would hold back all others."""
        if entry.made_from is None:
            self._copies.refills[entry.id] = None
        for dataset in entry.datasets if entry.made_from is not None else ():
            dataset.prefetch_at = 0

    def will_refill(self, entry: CacheEntry) -> bool:
        """Return whether an extent is noted to be filled again."""
        return entry.id in self._copies.refills

    def feed_refills(self) -> bool:
        """Start the fills of lost extents, in turn; False when one must wait."""
        while self._copies.refills:
            extent = next(iter(self._copies.refills))
            entry = self._copies.entries.get(extent)
            wanted = entry is not None and (entry.needs or any(d.prefetched for d in entry.datasets))
            if entry and wanted and not in_progress(entry) and not self._fill(entry):
                return False
            del self._copies.refills[extent]
        return True

    def feed(self) -> bool:
        """Start the fills of prefetches that have room and a slot: each dataset in its own order, one extent of each in
        turn. False when `FEED_LIMIT` was reached and there is more to do."""
        waiting: set[DatasetState] = set()
        for _ in range(FEED_LIMIT):
            datasets = self._policy.shares.datasets.values()
            unfinished = [
                each
                for each in datasets
                if each.prefetched and each not in waiting and self._unfinished(each)
            ]
            if not unfinished:
                return True
            # the one whose last fill was longest ago, so that calls go on round robin
            dataset = min(unfinished, key=lambda each: each.prefetch_fill)
            entry = self._next(dataset)
            if entry is not None and entry.made_from is not None and entry.queued:
                waiting.add(dataset)  # its readers may yet be refused
                continue
            if entry is not None and not in_progress(entry):
                if not self._fill(entry):
                    if entry.made_from is None:
                        return True
                    waiting.add(dataset)
                    continue
                self._fill_count += 1
                dataset.prefetch_fill = self._fill_count
            dataset.prefetch_at += 1
        return False

    def _next(self, dataset: DatasetState) -> CacheEntry | None:
        """The entry at the prefetch's place; None where the other pass fetches it. A member of a cluster fetches the
        extents that it owns first, and then the others from a place of its own on. So members that prefetch one dataset
        at once fetch different extents from the source."""
        count = len(dataset.extents)
        others, at = divmod(dataset.prefetch_at, count)
        if others:
            at = (at + self._policy.ownership.turn(count)) % count
        entry = self._copies.entries[dataset.extents[at][0]]
        return entry if entry.owned != bool(others) else None

    def _unfinished(self, dataset: DatasetState) -> bool:
        """Return whether the prefetch has extents left, and neither a claim nor an eviction of the dataset is under way."""
        passes = 2 if self._policy.ownership.shared else 1
        if dataset.prefetch_at >= passes * len(dataset.extents):
            return False
        return (WorkKind.CLAIM, dataset.id) not in self._work and (
            WorkKind.EVICT,
            dataset.id,
        ) not in self._work

    def _fill(self, entry: CacheEntry) -> bool:
        """Start a fill, or count the extent as stuck; False when it must wait for a slot or an eviction."""
        readiness = self._starts.readiness(entry)
        if readiness is Readiness.WAITS:
            return False
        if readiness is Readiness.NOW:
            placement = self._starts.start(entry, Requester.PLAN if entry.needs else Requester.PREFETCH)
            if placement is None:
                return True
            if placement.room_coming or self._room_is_coming(entry):
                return False
        elif not self._starts.has_preparer(entry):
            for dataset in entry.datasets:
                dataset.fail(entry.id, SourceUnavailable.code, NOBODY_PREPARES)
            return True
        self._copies.note_stuck(entry)
        return True

    def _room_is_coming(self, entry: CacheEntry) -> bool:
        """Return whether the extent's own old copy is being evicted from a tier that may then take it again, or a tier
        that stalls may answer again."""
        if any(tier.stalled and not tier.lost for tier in self._policy.tiers.values()):
            return True
        return any(copy.tier.evicting_bytes and not copy.tier.lost for copy in entry.copies)


def in_progress(entry: CacheEntry) -> bool:
    """Return whether an extent is resident, or is being fetched already."""
    return entry.ready or entry.filling() or bool(entry.queued) or entry.due_at is not None
