"""The parts of the daemon that fills use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from cachesvc.core import events
from cachesvc.core.errors import CacheError
from cachesvc.core.model import ExtentId, TierName
from cachesvc.core.placement.place_search import Verdict
from cachesvc.daemon.datasets import Datasets
from cachesvc.daemon.fills.checks import Checks
from cachesvc.daemon.fills.fill_memory import FillMemory
from cachesvc.daemon.fills.holes import HoleRecords
from cachesvc.daemon.fills.pool import FillerPool
from cachesvc.daemon.fills.preparers import Preparers
from cachesvc.daemon.fills.sent_bytes import SentBytes
from cachesvc.daemon.fills.shared_fills import Locate, SharedFills
from cachesvc.daemon.loop.lanes import Lane
from cachesvc.tiers.tier import Tier


@dataclass(slots=True)
class FillParts:
    """The parts of the daemon that fills use.

    `locate` finds a node to fill from, and `sent` knows what came from nodes; None without a cluster. `wrong_copy` is told
    of a node that sent wrong bytes, and whether they differ from the source or from their digests, and `judged` what each
    fill learned of a place.
    """

    tiers: Mapping[TierName, Tier]
    lanes: Mapping[TierName, Lane]
    commits: Commits
    datasets: Datasets
    fillers: FillerPool
    checks: Checks
    hole_records: HoleRecords
    handle: Callable[[events.Event], None]
    memory: FillMemory
    shared: SharedFills
    preparers: Preparers
    locate: Locate | None = None
    sent: SentBytes | None = None
    wrong_copy: Callable[[str, ExtentId, bool], None] = lambda node, extent, differs: None
    judged: Callable[[Sequence[Verdict]], None] = lambda verdicts: None


MAX_UNCOMMITTED = 32
"""No fill of a tier begins while so many of its commits are pending; fills that already run can add as many again. Each
has an open file, and is fetched again if the daemon ends before the commit."""


class Commits:
    """Runs on the loop's thread. An extent that is evicted while its commit is pending, since its tier was lost, is
    removed after the commit, on the same thread."""

    def __init__(self, lanes: Mapping[TierName, Lane], calls: Mapping[TierName, Lane]) -> None:
        """`lanes` run the commits of each disk, `calls` all other calls of each tier."""
        self._lanes = lanes
        self._calls = calls
        self._pending: dict[TierName, set[ExtentId]] = {tier: set() for tier in calls}
        self._waiting: dict[TierName, list[Callable[[], None]]] = {tier: [] for tier in calls}

    def submit(
        self,
        extent: ExtentId,
        tier: TierName,
        work: Callable[[], None],
        then: Callable[[None], None],
        otherwise: Callable[[CacheError], None],
    ) -> None:
        """Commit an extent: run `work`, then `then` or `otherwise`."""
        self._pending[tier].add(extent)

        def finished(answer: Callable[[], None]) -> None:
            self._pending[tier].discard(extent)
            answer()
            if len(self._pending[tier]) < MAX_UNCOMMITTED:
                waited, self._waiting[tier] = self._waiting[tier], []
                for each in waited:
                    each()

        self._lanes[tier].submit(
            work,
            lambda done: finished(partial(then, done)),
            lambda error: finished(partial(otherwise, error)),
        )

    def when_below_limit(self, tier: TierName, then: Callable[[], None]) -> None:
        """Call `then` at once, or as soon as fewer than `MAX_UNCOMMITTED` commits are pending."""
        if len(self._pending[tier]) < MAX_UNCOMMITTED:
            then()
        else:
            self._waiting[tier].append(then)

    def lane_after(self, extent: ExtentId, tier: TierName) -> Lane:
        """The lane on which a call about an extent runs after its pending commit, if it has one."""
        return self._lanes[tier] if extent in self._pending[tier] else self._calls[tier]
