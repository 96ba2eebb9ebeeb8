"""Claims of datasets: what jobs declare, and what operators pin and evict.

Work on all extents of a large dataset is done in steps (`core/records/incremental.py`), except claims and pins that are not
gradual. Work on a single extent costs O(1).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from cachesvc.core.events import DatasetDeclared, EvictAsked, Pinned, QuotasChanged, Unpinned
from cachesvc.core.model import DatasetId, ExtentId
from cachesvc.core.node.prefetch import Prefetches
from cachesvc.core.node.status import Counters, EpochCounters, PrefetchProgress
from cachesvc.core.records.dataset_state import DatasetState, DemandCounts
from cachesvc.core.records.incremental import IncrementalWork, WorkKind
from cachesvc.core.records.residency import CacheEntry
from cachesvc.core.tiering.copies import Copies
from cachesvc.core.tiering.role_changes import RoleChanges


class Claims:
    """Claimed datasets by job. The shares hold them by id."""

    def __init__(
        self, copies: Copies, roles: RoleChanges, work: IncrementalWork, prefetches: Prefetches
    ) -> None:
        self._copies = copies
        self._roles = roles
        self._shares = copies.policy.shares
        self._reserve = copies.policy.reserve
        self._ownership = copies.policy.ownership
        self._work = work
        self._prefetches = prefetches
        self._jobs: dict[int, list[DatasetState]] = {}

    def declare(self, event: DatasetDeclared) -> None:
        """Claim a dataset for a job; claiming it twice changes nothing."""
        job, name = event.job, event.dataset
        dataset = self._shares.datasets.get(name)
        if dataset is None:
            counts = self._copies.counts.setdefault(name, DemandCounts())
            distinct = event.extents if event.gradual else tuple(dict(event.extents).items())
            dataset = DatasetState(name, distinct, counts, event.sample_bytes)
            if event.made_from:
                made_from = zip((extent for extent, _ in event.extents), event.made_from, strict=True)
                dataset.made_from = dict(made_from)
                dataset.largest_source_bytes = max(size_bytes for _, size_bytes in event.made_from)
                dataset.uneven = event.uneven
            self._shares.add(dataset)
        if not dataset.claimed:  # it is new, or the end of its last claim is under way and stops here
            dataset.user = event.user
            dataset.quota_bytes, dataset.user_quota_bytes = event.quota_bytes, event.user_quota_bytes
            self._do(WorkKind.CLAIM, dataset, self._claim(dataset))
        if not event.gradual:
            self._work.finish((WorkKind.CLAIM, name))
        if job not in dataset.jobs:
            dataset.jobs.add(job)
            self._jobs.setdefault(job, []).append(dataset)

    def claimed(self, name: DatasetId) -> bool:
        """Return whether neither a claim of the dataset nor the end of one is under way."""
        return (WorkKind.CLAIM, name) not in self._work

    def settled(self, name: DatasetId) -> bool:
        """Return whether no claim, end of a claim, pin or unpin of the dataset is under way."""
        return self.claimed(name) and (WorkKind.PIN, name) not in self._work

    def evicted(self, name: DatasetId) -> bool:
        """Return whether no eviction of the dataset is under way."""
        return (WorkKind.EVICT, name) not in self._work

    def end_job(self, job: int) -> None:
        """Give up a job's claims. Extents that no other job claims and no pin holds become LRU. A prefetch that is not done
        ends with the last job that asked for it, even if other jobs claim the dataset."""
        for dataset in self._jobs.pop(job, ()):
            dataset.jobs.discard(job)
            self._prefetches.leave(dataset, job)
            self._unclaim_unused(dataset)

    def pin(self, event: Pinned) -> None:
        """Keep the resident extents of a declared dataset, as far as the quotas of the user who pins it allow."""
        dataset = self._shares.datasets.get(event.dataset)
        if dataset and dataset.claimed:
            dataset.pin(event.user, event.quota_bytes, event.user_quota_bytes)
            self._reserve.retune()
            self._do(WorkKind.PIN, dataset, self._reassess(dataset))
            if not event.gradual:
                self._work.finish((WorkKind.CLAIM, dataset.id))
                self._work.finish((WorkKind.PIN, dataset.id))

    def requote(self, event: QuotasChanged) -> None:
        """Set other quotas of a declared dataset, and keep as much as they allow."""
        dataset = self._shares.datasets.get(event.dataset)
        if dataset and dataset.claimed:
            dataset.requote(event.quota_bytes, event.of_users)
            self._reserve.retune()
            self._do(WorkKind.PIN, dataset, self._reassess(dataset))

    def unpin(self, event: Unpinned) -> None:
        """End a pin."""
        dataset = self._shares.datasets.get(event.dataset)
        if dataset and dataset.pinned:
            dataset.unpin()
            self._reserve.retune()
            self._do(WorkKind.PIN, dataset, self._reassess(dataset))
            self._unclaim_unused(dataset)

    def evict(self, event: EvictAsked) -> None:
        """Evict the idle, unpinned extents of a dataset, and end its prefetch."""
        name, named, count = event.dataset, iter(event.extents), len(event.extents)
        dataset = self._shares.datasets.get(name)
        if dataset:
            self._prefetches.end(dataset)
            named, count = (extent for extent, _ in dataset.extents), len(dataset.extents)
        self._work.do((WorkKind.EVICT, name), self._evict(name, named), count)

    def progress(self, job: int) -> PrefetchProgress:
        """Report how much of a job's datasets is resident, and why the rest is not."""
        datasets = self._jobs.get(job, [])
        failed: dict[ExtentId, tuple[int, str]] = {}
        for dataset in datasets:
            failed.update(dataset.failed)
        return PrefetchProgress(
            resident_extents=sum(each.ready_count for each in datasets),
            resident_bytes=sum(each.ready_bytes for each in datasets),
            total_extents=sum(len(each.extents) for each in datasets),
            total_bytes=sum(each.size_bytes for each in datasets),
            failed=failed,
            incomplete=self._incomplete(datasets),
            stuck_extents=sum(len(each.stuck) for each in datasets),
            stuck_bytes=sum(sum(each.stuck.values()) for each in datasets),
        )

    def elsewhere(self, job: int) -> list[ExtentId]:
        """The extents that a job's prefetch left to the nodes of the cluster that own them. Safe from any thread, as it
        takes too long for the loop's: it copies what may change, and reads each entry by itself."""
        entries = self._copies.entries
        stuck = (extent for dataset in tuple(self._jobs.get(job, ())) for extent in tuple(dataset.stuck))
        entries_of = (entries.get(extent) for extent in stuck)
        return [entry.id for entry in entries_of if entry is not None and not entry.owned]

    def _incomplete(self, datasets: list[DatasetState]) -> dict[ExtentId, tuple[int, str]]:
        """Resident extents of these datasets in which objects are missing, and why the first one is."""
        entries = self._copies.entries
        found = ((extent, why, entries.get(extent)) for extent, why in self._copies.incomplete.items())
        return {
            extent: why
            for extent, why, entry in found
            if entry and any(d in datasets for d in entry.datasets)
        }

    def prefetching(self, job: int) -> bool:
        """Return whether no eviction has ended the prefetch of a job's datasets."""
        return all(each.prefetched for each in self._jobs.get(job, ()))

    def counters(self, name: DatasetId) -> Counters:
        """A dataset's counts since it was first declared; zeros for one that never was."""
        counts = self._copies.counts.get(name) or DemandCounts()
        dataset = self._shares.datasets.get(name)
        return Counters(
            dataset=name,
            hits=counts.hits,
            ahead=counts.ahead,
            misses=counts.misses,
            refused=counts.refused,
            source_bytes=counts.source_bytes,
            kept_bytes=dataset.kept_bytes if dataset else 0,
            resident_bytes=dataset.ready_bytes if dataset else 0,
            total_bytes=dataset.size_bytes if dataset else 0,
            bound=self._shares.bound_of(dataset) if dataset else 0.0,
            epochs=tuple(
                EpochCounters(each.number, each.touched, each.hits, each.bound)
                for each in (dataset.epochs if dataset else ())
            ),
        )

    def _do(self, work: WorkKind, dataset: DatasetState, steps: Iterator[None]) -> None:
        self._work.do((work, dataset.id), steps, len(dataset.extents))

    # Each of the following yields after each step, and looks at the state anew when it goes on.

    def _claim(self, dataset: DatasetState) -> Iterator[None]:
        """Claim its extents, then give their copies their roles."""
        for extents in self._work.cut(dataset.extents):
            for extent, size_bytes in extents:
                entry = self._copies.ensure_entry(extent, size_bytes)
                entry.made_from = dataset.made_from.get(extent)
                entry.most_bytes = size_bytes if dataset.uneven else 0
                if dataset not in entry.datasets:  # else the end of the last claim had not reached it yet
                    self._shares.join(dataset, entry)
            if self._ownership.shared or dataset.local:
                self._ownership.mark([self._copies.entries[extent] for extent, _ in extents])
            self._reserve.retune()
            yield
        yield from self._reassess(dataset)

    def _unclaim_unused(self, dataset: DatasetState) -> None:
        if dataset.claimed:
            return
        self._prefetches.end(dataset)
        self._work.drop((WorkKind.PIN, dataset.id))  # the end of the claim reassesses every copy
        self._do(WorkKind.CLAIM, dataset, self._unclaim(dataset))

    def _unclaim(self, dataset: DatasetState) -> Iterator[None]:
        """Give up its extents, then forget the dataset."""
        for extents in self._work.cut(dataset.extents):
            for extent, _ in extents:
                entry = self._copies.entries.get(extent)
                if entry is not None and dataset in entry.datasets:
                    self._shares.leave(dataset, entry)
                    self._roles.reassess(entry)
                    self._want_no_source(entry)
                    self._copies.forget(entry)
            yield
        self._shares.remove(dataset)
        self._roles.drop_kept_lists(dataset)
        self._reserve.retune()

    def _want_no_source(self, entry: CacheEntry) -> None:
        source = self._copies.entries.get(entry.made_from[0]) if entry.made_from else None
        if source is not None and entry in source.wanted_by:
            source.wanted_by.remove(entry)
            self._copies.forget(source)

    def _evict(self, name: DatasetId, extents: Iterator[ExtentId]) -> Iterator[None]:
        while named := list(islice(extents, self._work.size)):
            dataset = self._shares.datasets.get(name)
            for extent in named:
                entry = self._copies.entry(extent)
                if entry is None or (entry.pinned and entry.kept):
                    continue
                for copy in tuple(entry.copies):
                    if copy.idle and not copy.tier.lost:
                        self._copies.evict(copy)
                if dataset:
                    dataset.stuck.pop(
                        extent, None
                    )  # a prefetch that is asked for meanwhile begins when this is done
            yield

    def _reassess(self, dataset: DatasetState) -> Iterator[None]:
        """Give its copies their roles and eviction lists anew."""
        for extents in self._work.cut(dataset.extents):
            for extent, _ in extents:
                entry = self._copies.entries.get(extent)
                if entry is None or not entry.copies or dataset not in entry.datasets:
                    continue  # a claim under way will reach it, and give it its role then
                self._roles.reassess(entry)
                if dataset.pinned:
                    self._roles.keep_pinned(entry)
            yield
