"""Counts of fills, for `status` and metrics."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

from cachesvc.catalog.survey import provisional_id
from cachesvc.core.commands import StartFill
from cachesvc.core.histogram import Histogram
from cachesvc.core.model import DatasetId, TierName
from cachesvc.daemon.processes import jobs


@dataclass(slots=True)
class FillCounts:
    """Counts of all fills since the daemon's start."""

    from_source: Counter[DatasetId] = field(default_factory=Counter)
    from_peers: Counter[DatasetId] = field(default_factory=Counter)
    """Bytes fetched for each dataset."""
    failures: Counter[str] = field(default_factory=Counter)
    """Failed fills by the name of the error, including those that were retried."""
    waits: dict[str, Histogram] = field(
        default_factory=lambda: {origin: Histogram() for origin in ("source", "peer", "tier", "job")}
    )
    """How long fills took until their bytes could be granted, by where these came from; `job`: from a job that prepares
    samples."""
    filled_bytes: Counter[TierName] = field(default_factory=Counter)
    """Bytes that were filled into each tier."""
    received: Counter[str] = field(default_factory=Counter)
    """Bytes of extents that came from each other node, also for fills that failed."""
    peer_waits: Histogram = field(default_factory=Histogram)
    """How long each read from another node took, failed ones included. Some waited for blocks that the node did not have
    yet."""
    peer_failures: int = 0
    """How often a node failed to give an extent, or was late."""
    hedged_bytes: int = 0
    """Bytes of extents that were asked of the source because the node that was fetching them was late."""

    def source_bytes(self, dataset: DatasetId) -> int:
        """Bytes fetched from the source, including those fetched while the dataset was indexed."""
        return self.from_source[dataset] + self.from_source[provisional_id(dataset)]

    def peer_bytes(self, dataset: DatasetId) -> int:
        """Bytes fetched from other nodes."""
        return self.from_peers[dataset]

    def filled(self, command: StartFill, from_peer: bool, size_bytes: int, took_s: float) -> None:
        """Count a fill whose bytes can be granted."""
        origin = "peer" if from_peer else "source"
        if command.from_tier is not None:
            origin = "tier"
        elif command.preparer is not None:
            origin = "job"
        self.waits[origin].observe(took_s)
        self.filled_bytes[command.tier] += size_bytes

    def fetched(self, dataset: DatasetId, done: jobs.JobDone) -> None:
        """Count a job's bytes."""
        self.from_source[dataset] += done.source_bytes
        self.from_peers[dataset] += done.peer_bytes

    def read_from(self, node: str, since: float, done: jobs.JobDone) -> None:
        """Count a read from another node, which began at `since` on the monotonic clock."""
        self.received[node] += done.peer_bytes
        self.peer_waits.observe(time.monotonic() - since)
