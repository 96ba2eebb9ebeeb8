"""Samples what the daemon's status shows over time: throughput, by counters that are read every few seconds, and the hit
rates of claimed datasets."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from itertools import islice, pairwise

from cachesvc.core.model import RAM, DatasetId
from cachesvc.core.node.node import Node
from cachesvc.core.node.status import Counters
from cachesvc.daemon.fills.fill_counts import FillCounts
from cachesvc.daemon.fills.pool import FillerPool
from cachesvc.v1 import cachesvc_pb2 as pb

MAX_DATASETS = 64
"""Datasets whose hit rates are sampled: programs may open thousands of files by name."""


SERIES = ("source", "peers", "ram", "nvme")
"""Where bytes come from, by the names of the messages."""


class History:
    """A timer of the runner. Runs on the loop's thread."""

    def __init__(self, node: Node, counts: FillCounts, fillers: FillerPool) -> None:
        self._node, self._counts, self._fillers = node, counts, fillers
        self._throughput = ThroughputHistory()
        self._hits: dict[DatasetId, deque[tuple[float, float]]] = {}

    def next_deadline(self) -> float:
        """See `Timer`."""
        return self._throughput.next_deadline()

    def tick(self) -> None:
        """Take a sample."""
        self._throughput.add(time.monotonic(), self._totals())
        known, self._hits = self._hits, {}
        for dataset in islice(self._node.policy.shares.datasets, MAX_DATASETS):
            counters = self._node.counters(dataset)
            points = self._hits[dataset] = known.get(dataset) or deque(maxlen=STEPS)
            points.append((hit_rate(counters), counters.bound))

    def throughput(self) -> pb.Throughput:
        """Return the rates of the last seconds."""
        latest = self._throughput.latest(time.monotonic(), self._totals())
        return pb.Throughput(**dict(zip(SERIES, latest, strict=True)))

    def message(self) -> pb.History:
        """Return the rates of the last minutes."""
        found = pb.History(step_s=STEP_S)
        for rates in self._throughput.rates():
            for name, rate in zip(SERIES, rates, strict=True):
                getattr(found, name).append(round(rate))
        return found

    def hits(self, dataset: DatasetId) -> list[tuple[float, float]]:
        """Return the hit rate and the bound of a dataset at each step, oldest first."""
        return list(self._hits.get(dataset, ()))

    def _totals(self) -> tuple[float, float, float, float]:
        tiers = self._node.policy.tiers.values()
        ram = sum(tier.granted_bytes for tier in tiers if tier.name == RAM)
        nvme = sum(tier.granted_bytes for tier in tiers if tier.name != RAM)
        source = self._fillers.source_requests
        return source.bytes + source.hedge_bytes, self._counts.received.total(), ram, nvme


def hit_rate(counters: Counters) -> float:
    """Return the hit rate of the latest epoch; of a dataset without plans, hits as a part of all demands."""
    epochs = [epoch for epoch in counters.epochs[-2:] if epoch.touched]
    return epochs[-1].hit_rate if epochs else counters.hit_rate


STEP_S = 5.0
"""The interval of samples: short enough to see a stall, long enough to be no load."""
STEPS = 120
"""Samples that are kept: ten minutes."""
LATEST_STEPS = 2
"""The latest rate is that of so many steps: fills end in bursts."""


class ThroughputHistory:
    """Rates of counters that only grow. Times are seconds of a clock that does not go back."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, tuple[float, ...]]] = deque(maxlen=STEPS + 1)

    def next_deadline(self) -> float:
        """The time at which `add` is due; 0 at the beginning."""
        return self._samples[-1][0] + STEP_S if self._samples else 0.0

    def add(self, now: float, totals: Sequence[float]) -> None:
        """Add a sample of all counters."""
        self._samples.append((now, tuple(totals)))

    def latest(self, now: float, totals: Sequence[float]) -> tuple[float, ...]:
        """The rates of the last seconds, up to `totals` now; zeros before the first sample."""
        if not self._samples:
            return (0.0,) * len(totals)
        since, before = self._samples[-min(LATEST_STEPS, len(self._samples))]
        return _rates(before, totals, now - since)

    def rates(self) -> list[tuple[float, ...]]:
        """The rates of each step, oldest first."""
        samples = list(self._samples)
        return [_rates(before, after, until - since) for (since, before), (until, after) in pairwise(samples)]


def _rates(before: Sequence[float], after: Sequence[float], elapsed_s: float) -> tuple[float, ...]:
    return tuple(max(0.0, new - old) / max(elapsed_s, 1e-3) for old, new in zip(before, after, strict=True))
