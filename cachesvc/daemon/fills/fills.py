"""Fills as they are carried out: reserve in the tier, fill in a filler, commit. What a lost tier leaves
half-done is answered at once, and undone behind its threads."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

from cachesvc.catalog.build import provisional_id
from cachesvc.core import commands, events
from cachesvc.core.errors import CacheError, CorruptData, SourceUnavailable, TierFailed, from_code
from cachesvc.core.model import DatasetId, ExtentId, TierName
from cachesvc.daemon.datasets import Dataset, Datasets
from cachesvc.daemon.fills.checks import Checks
from cachesvc.daemon.fills.commits import Commits
from cachesvc.daemon.fills.memory_admission import Work, cost_of
from cachesvc.daemon.fills.missing_objects import Lack, Lacking
from cachesvc.daemon.fills.pool import Fillers
from cachesvc.daemon.loop.lanes import Lane
from cachesvc.daemon.processes import jobs
from cachesvc.tiers.tier import Checksums, Recovering, Tier

log = logging.getLogger(__name__)
_Key = tuple[ExtentId, TierName]
T = TypeVar("T")


class Fills:
    """Executes `StartFill`. Runs on the loop's thread; a call or job that ends after its tier was lost finds
    its command forgotten."""

    def __init__(
        self,
        tiers: Mapping[TierName, Tier],
        lanes: Mapping[TierName, Lane],
        commits: Commits,
        datasets: Datasets,
        fillers: Fillers,
        checks: Checks,
        lacking: Lacking,
        handle: Callable[[events.Event], None],
        work: Work,
    ) -> None:
        self._tiers = tiers
        self._lanes = lanes
        self._commits = commits
        self._datasets = datasets
        self._fillers = fillers
        self._checks = checks
        self._lacking = lacking
        self._handle = handle
        self._work = work
        self._source_bytes: dict[DatasetId, int] = {}
        self._peer_bytes: dict[DatasetId, int] = {}
        self._filling: dict[_Key, commands.StartFill] = {}
        self._paused: list[commands.StartFill] | None = None
        self.failures: Counter[str] = Counter()
        """Fills that failed, those that were tried again included, by the name of the error."""

    def pause(self) -> None:
        """Begin no fill until `resume`; what is commanded meanwhile waits."""
        self._paused = self._paused or []

    def resume(self) -> None:
        """Begin what waited."""
        waited, self._paused = self._paused or [], None
        for command in waited:
            self._begin(command)

    def source_bytes(self, dataset: DatasetId) -> int:
        """Bytes fetched from the source, those by which it was indexed included."""
        return sum(self._source_bytes.get(each, 0) for each in (dataset, provisional_id(dataset)))

    def peer_bytes(self, dataset: DatasetId) -> int:
        """Bytes that other nodes gave."""
        return self._peer_bytes.get(dataset, 0)

    @property
    def under_way(self) -> int:
        """Fills and commits that have begun."""
        waiting = sum(self._filling.get((each.extent, each.tier)) is each for each in self._paused or ())
        return len(self._filling) - waiting + len(self._checks.committing)

    def leave(self, name: TierName, why: str) -> None:
        """Answer the fills that wait for a tier."""
        for command in [c for c in self._filling.values() if name in (c.tier, c.from_tier)]:
            code = TierFailed.code if command.tier == name else SourceUnavailable.code
            tier, extent = self._tiers[command.tier], command.extent
            del self._filling[(extent, command.tier)]
            self._lanes[command.tier].submit(partial(tier.abort, extent), lambda _: None, lambda _: None)
            self._failed(command, code, f"{name}: {why}", retry=True)

    def tier_lost(self, name: TierName, why: str) -> None:
        """Answer all that waits for the tier."""
        self.leave(name, why)
        committing = self._checks.committing
        for key in [key for key in committing if key[1] == name]:
            del committing[key]
            self._handle(events.CommitFailed(*key, f"{name}: {why}"))

    def start(self, command: commands.StartFill) -> None:
        """Begin a fill; `Filled` or `FillFailed` follows, and for a disk `Committed` or `CommitFailed`."""
        self._filling[(command.extent, command.tier)] = command
        if self._paused is None:
            self._begin(command)
        else:
            self._paused.append(command)

    def _begin(self, command: commands.StartFill) -> None:
        self._commits.when_few(command.tier, partial(self._reserve, command))

    def _reserve(self, command: commands.StartFill) -> None:
        if self._filling.get((command.extent, command.tier)) is not command:
            return  # answered while it waited: its tier was lost
        home = self._datasets.home(command.extent)
        assert home is not None, "a fill of what nobody claims"
        dataset, index = home
        size, tier = dataset.sizes[index], self._tiers[command.tier]
        self._lanes[command.tier].submit(
            lambda: tier.reserve(command.extent, size),
            lambda target: self._send_fill(command, dataset, index, target),
            lambda error: self._not_reserved(command, error),
        )

    def _not_reserved(self, command: commands.StartFill, error: CacheError) -> None:
        self._checks.suspect(command.tier, error)
        if _ended(self._filling, command, command):
            log.error("a tier takes no more for a while", extra={"tier": command.tier, "error": str(error)})
            self._failed(command, error.code, str(error), retry=False)

    def _send_fill(self, command: commands.StartFill, dataset: Dataset, index: int, target: int) -> None:
        if self._filling.get((command.extent, command.tier)) is not command:
            os.close(target)  # aborted meanwhile: its tier was lost
            return
        # Whoever wanted it may be gone when the answer comes, and the dataset forgotten.
        filled = partial(self._filled, command, dataset.id, dataset.sizes[index])
        if command.from_tier is None:
            cost = cost_of(dataset.catalog, dataset.sizes[index])
            self._work.begin(cost, partial(self._fetch, command, dataset, index, target, cost))
            return

        tiers = command.tier, command.from_tier

        def opened(origin: int, checksums: Checksums | None) -> None:
            assert checksums is not None
            if self._filling.get((command.extent, command.tier)) is command:  # no tier was lost
                digests = jobs.pack_digests(checksums.digests)
                copy = partial(jobs.Copy, size_bytes=checksums.size_bytes, digests=digests)
                self._fillers.submit(copy, (target, origin), filled, tiers)
            os.close(origin)
            os.close(target)

        def failed(error: CacheError) -> None:
            os.close(target)
            filled(jobs.Done(0, error.code, str(error), retry=True))

        self._checks.open(command.extent, command.from_tier, opened, failed)

    def _fetch(
        self, command: commands.StartFill, dataset: Dataset, index: int, target: int, cost: int
    ) -> None:
        size_bytes = dataset.sizes[index]

        def filled(answer: jobs.Answer) -> None:
            self._work.end(cost)
            self._filled(command, dataset.id, size_bytes, answer)

        if self._filling.get((command.extent, command.tier)) is command:
            job = partial(jobs.Fill, dataset=dataset.id, index=index)
            self._fillers.submit(job, (target, dataset.catalog_fd), filled, (command.tier,))
        else:  # aborted while it waited: its tier was lost
            self._work.end(cost)
        os.close(target)

    def _filled(
        self, command: commands.StartFill, dataset: DatasetId, size_bytes: int, answer: jobs.Answer
    ) -> None:
        assert isinstance(answer, jobs.Done)
        if command.from_tier is None:
            self._source_bytes[dataset] = self._source_bytes.get(dataset, 0) + answer.source_bytes
            self._peer_bytes[dataset] = self._peer_bytes.get(dataset, 0) + answer.peer_bytes
        if answer.code:
            self._fill_ended_badly(command, answer)
            return
        if self._filling.get((command.extent, command.tier)) is not command:
            return  # aborted meanwhile: its tier was lost
        checksums = Checksums(size_bytes, jobs.unpack_digests(answer.digests))
        tier, lack = self._tiers[command.tier], self._lack(command, answer)
        self._lacking.filled(command.extent, command.tier, lack)
        if not isinstance(tier, Recovering):
            # RAM: sealing is what makes it safe to grant, and takes microseconds.
            self._lanes[command.tier].submit(
                lambda: tier.commit(command.extent, checksums),
                lambda _: self._ready(command, answer, lack),
                lambda error: self._abort(command, jobs.Done(0, error.code, str(error))),
            )
            return
        # NVMe: readers wait for verified bytes, not for durability.
        self._checks.committing[(command.extent, command.tier)] = checksums
        self._ready(command, answer, lack)
        commit = tier.hold if lack.holes else tier.commit
        self._commits.submit(
            command.extent,
            command.tier,
            lambda: commit(command.extent, checksums),
            lambda _: self._committed(command, checksums),
            lambda error: self._not_committed(command, checksums, error),
        )

    def _lack(self, command: commands.StartFill, answer: jobs.Done) -> Lack:
        """The holes of a copy: those that its fill reports, or those of the copy that it was filled from."""
        if command.from_tier is not None:
            return self._lacking.of(command.extent, command.from_tier)
        if answer.holes:
            told = {"extent": command.extent.hex(), "error": answer.message}
            log.warning("an extent was filled without some of its objects", extra=told)
        return Lack(answer.holes, answer.hole_code, answer.message)

    def _ready(self, command: commands.StartFill, answer: jobs.Done, lack: Lack) -> None:
        if _ended(self._filling, command, command):
            filled = events.Filled(
                command.extent, command.tier, answer.peer_bytes > 0, lack.code, lack.message
            )
            self._handle(filled)

    def _committed(self, command: commands.StartFill, checksums: Checksums) -> None:
        if _ended(self._checks.committing, command, checksums):
            self._handle(events.Committed(command.extent, command.tier))

    def _not_committed(self, command: commands.StartFill, checksums: Checksums, error: CacheError) -> None:
        self._checks.suspect(command.tier, error)
        if _ended(self._checks.committing, command, checksums):
            log.warning("a commit failed", extra={"extent": command.extent.hex(), "error": str(error)})
            self.failures[type(error).__name__] += 1
            self._handle(events.CommitFailed(command.extent, command.tier, str(error), error.code))

    def _fill_ended_badly(self, command: commands.StartFill, answer: jobs.Done) -> None:
        origin = command.from_tier
        if origin is None:
            if answer.code == TierFailed.code:
                self._checks.suspect(command.tier, TierFailed(answer.message))
        elif answer.code in (CorruptData.code, TierFailed.code):
            # It is the copy that was read: the tier that was to take it did nothing wrong.
            self._checks.failed(command.extent, origin, answer.code)
            answer = jobs.Done(answer.number, SourceUnavailable.code, answer.message, retry=True)
        self._abort(command, answer)

    def _abort(self, command: commands.StartFill, answer: jobs.Done) -> None:
        def failed(_: object) -> None:
            if _ended(self._filling, command, command):
                self._failed(command, answer.code, answer.message, answer.retry)

        if self._filling.get((command.extent, command.tier)) is command:
            log.warning("a fill failed", extra={"extent": command.extent.hex(), "error": answer.message})
            self._lanes[command.tier].submit(
                partial(self._tiers[command.tier].abort, command.extent), failed, failed
            )

    def _failed(self, command: commands.StartFill, code: int, message: str, retry: bool) -> None:
        self.failures[type(from_code(code, message)).__name__] += 1
        self._handle(events.FillFailed(command.extent, command.tier, code, message, retry))


def _ended(under_way: dict[_Key, T], command: commands.StartFill, begun: T) -> bool:
    """Forget a fill or a commit; False where that happened already, because its tier was lost."""
    key = (command.extent, command.tier)
    if under_way.get(key) is not begun:
        return False
    del under_way[key]
    return True
