"""The cache directories at the daemon's start: opened side by side, each on the thread that later probes it.

An error that the operator must correct (the path is no directory, another daemon uses it, it has no room) keeps the
daemon from starting. A disk in trouble does not: its tier begins as lost, and the watch tries `Disk.open` again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path

from cachesvc.config import NAMED_TWICE, Settings
from cachesvc.core import events
from cachesvc.core.errors import CacheError, InvalidInput, TierFailed
from cachesvc.core.model import RAM, ExtentId, TierName
from cachesvc.core.records.residency import TierState
from cachesvc.core.tiering.policy import TierSpec
from cachesvc.daemon.disks.budgets import checked_budget
from cachesvc.daemon.disks.renewal import Disk
from cachesvc.daemon.loop.lanes import Lane
from cachesvc.daemon.runner import Runner
from cachesvc.tiers.mounts import misplaced
from cachesvc.tiers.tier import translated

log = logging.getLogger(__name__)
SILENT_S = 5.0
"""The start stops waiting for a disk that makes no progress for so long; listing a million extents takes 256 steps."""
POLL_S = 0.1


class DirectoryOpening:
    """The opening of one cache directory."""

    def __init__(self, disk: Disk, probes: Lane) -> None:
        self.disk = disk
        self.probes = probes
        """The thread that opens the directory and probes it later: a probe waits for an opening that hangs."""
        self.done: Future[CacheError | None] = Future()
        """The error, or None when the directory is open."""
        self._progress_at = time.monotonic()

    def begin(self) -> None:
        """Start to open the directory."""
        self._progressed()
        self.probes.submit(self._run, lambda _: None, lambda _: None)

    def silent_s(self) -> float:
        """Seconds since the last progress."""
        return time.monotonic() - self._progress_at

    def _run(self) -> None:
        failed: CacheError | None = TierFailed(f"{self.disk.path} was not opened; the log says more")
        try:
            with translated(str(self.disk.path), "open the cache directory"):
                self.disk.open(self._progressed)
            failed = None
        except CacheError as error:
            failed = error
        finally:
            self.done.set_result(failed)

    def _progressed(self) -> None:
        self._progress_at = time.monotonic()


def begun_openings(settings: Settings, lane: Callable[[str], Lane]) -> list[DirectoryOpening]:
    """Begin to open all cache directories, each on a lane of its own."""
    openings = []
    for number, spec in enumerate(settings.nvme):
        name = TierName(f"nvme{number}")
        disk = Disk(name, Path(spec.path).absolute(), spec.mounted)
        openings.append(DirectoryOpening(disk, lane(f"probe-{name}")))
        openings[-1].begin()
    return openings


def weight_bytes(
    settings: Settings, openings: Sequence[DirectoryOpening], tiers: Mapping[TierName, TierState]
) -> int:
    """Return the room of all tiers, which decides this node's share of a cluster's extents. As configured where that is in
    bytes, since shares move when it changes."""
    sizes = (
        spec.size_bytes or tiers[each.disk.name].given_bytes
        for each, spec in zip(openings, settings.nvme, strict=True)
    )
    return settings.ram_bytes + sum(sizes)


def wait_until_open(openings: Sequence[DirectoryOpening], silent_s: float = SILENT_S) -> dict[TierName, str]:
    """Wait until each opening is done, or without progress for `silent_s` seconds.

    Returns the reasons why tiers begin as lost. Raises the CacheError that the operator must correct.
    """
    waiting = list(openings)
    while waiting:
        wait([each.done for each in waiting], POLL_S, FIRST_COMPLETED)
        waiting = [each for each in waiting if not each.done.done() and each.silent_s() < silent_s]
    reasons = {each.disk.name: _reason(each, silent_s) for each in openings}
    return {name: reason for name, reason in reasons.items() if reason}


def _reason(opening: DirectoryOpening, silent_s: float) -> str:
    if not opening.done.done():
        return (
            f"{opening.disk.path} has not answered for {silent_s:.0f} s; look into dmesg, or replace the disk"
        )
    error = opening.done.result()
    if error is not None and not isinstance(error, TierFailed):
        raise error
    return str(error or "")


def tiers_at_start(
    settings: Settings,
    openings: Sequence[DirectoryOpening],
    lost: Mapping[TierName, str],
    in_ram: events.Recovered,
) -> tuple[list[TierSpec], list[events.Recovered]]:
    """The tiers with their budgets, and the extents that the open ones hold.

    Raises OutOfSpace where a budget holds no extent, InvalidInput where two paths name one directory.
    """
    specs = [TierSpec(RAM, settings.ram_bytes)] if settings.ram_bytes else []
    recovered = [in_ram] if settings.ram_bytes else []
    for opening, spec in zip(openings, settings.nvme, strict=True):
        disk = opening.disk
        successor = disk.take() if disk.name not in lost else None
        if successor is None:
            specs.append(TierSpec(disk.name, 0))  # until the disk is measured
            continue
        budget = checked_budget(spec, successor.room, sum(successor.extents.values()), settings.extent_bytes)
        log.info(
            "cache directory",
            extra={"dir": spec.path, "extents": len(successor.extents), "budget_bytes": budget},
        )
        if why := misplaced(str(disk.path)):
            log.warning("%s; mount its disk if it is to have one, and give DIR=SIZE,mounted", why)
        specs.append(TierSpec(disk.name, budget))
        recovered.append(events.Recovered(disk.name, successor.extents))
    _check_each_once([opening.disk for opening in openings])
    return specs, recovered


def _check_each_once(disks: Sequence[Disk]) -> None:
    """Raise InvalidInput where two disks are one directory, also where one of them failed.

    Each would remove the files that the other writes. The lock does not prevent it where both inherited it.
    """
    seen: set[tuple[int, int]] = set()
    for disk in disks:
        if disk.directory_id is None:
            continue
        if disk.directory_id in seen:
            raise InvalidInput(NAMED_TWICE.format(disk.path))
        seen.add(disk.directory_id)


def report_recovered(
    recovered: Sequence[events.Recovered],
    runner: Runner,
    unverified: Mapping[TierName, set[ExtentId]],
    pinned_last: Callable[[events.Recovered], events.Recovered],
) -> None:
    """Tell the core what its tiers hold. Pinned extents come last, so they stay, where the extents exceed a budget.
    Copies on disks are verified before their first grant; sealed memory cannot have changed."""
    for event in recovered:
        if sum(event.extents.values()) > runner.node.policy.tiers[event.tier].budget_bytes:
            event = pinned_last(event)
        if event.tier != RAM:
            unverified[event.tier].update(event.extents)
        runner.handle(event)
