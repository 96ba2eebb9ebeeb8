"""Samples what the daemon's status shows over time: throughput, and the hit rates of claimed datasets."""

from __future__ import annotations

import time
from collections import deque
from itertools import islice

from cachesvc.core.model import RAM, DatasetId
from cachesvc.core.node.node import Node
from cachesvc.core.node.status import Counters
from cachesvc.core.rates.throughput import STEP_S, STEPS, ThroughputHistory
from cachesvc.daemon.fills.fill_counts import FillCounts
from cachesvc.daemon.fills.pool import FillerPool
from cachesvc.v1 import cachesvc_pb2 as pb

MAX_DATASETS = 64
"""Datasets whose hit rates are sampled: programs may open thousands of files by name."""


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
        source, peers, ram, nvme = self._throughput.latest(time.monotonic(), self._totals())
        return pb.Throughput(source=source, peers=peers, ram=ram, nvme=nvme)

    def message(self) -> pb.History:
        """Return the rates of the last minutes."""
        found = pb.History(step_s=STEP_S)
        for source, peers, ram, nvme in self._throughput.rates():
            found.source.append(round(source))
            found.peers.append(round(peers))
            found.ram.append(round(ram))
            found.nvme.append(round(nvme))
        return found

    def hits(self, dataset: DatasetId) -> list[tuple[float, float]]:
        """Return the hit rate and the bound of a dataset at each step, oldest first."""
        return list(self._hits.get(dataset, ()))

    def _totals(self) -> tuple[float, float, float, float]:
        tiers = self._node.policy.tiers.values()
        ram = sum(tier.granted_bytes for tier in tiers if tier.name == RAM)
        nvme = sum(tier.granted_bytes for tier in tiers if tier.name != RAM)
        source = self._fillers.source_requests
        return source.bytes + source.hedge_bytes, self._counts.received_bytes, ram, nvme


def hit_rate(counters: Counters) -> float:
    """Return the hit rate of the latest epoch; of a dataset without plans, hits as a part of all demands."""
    epochs = [epoch for epoch in counters.epochs[-2:] if epoch.touched]
    return epochs[-1].hit_rate if epochs else counters.hit_rate
