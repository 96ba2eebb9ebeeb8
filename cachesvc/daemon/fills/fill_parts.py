"""The parts of the daemon that fills use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cachesvc.core import events
from cachesvc.core.model import ExtentId, TierName
from cachesvc.core.placement.place_search import Verdict
from cachesvc.daemon.datasets import Datasets
from cachesvc.daemon.fills.checks import Checks
from cachesvc.daemon.fills.commits import Commits
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
