"""Builds the status messages of the daemon and its datasets."""

from __future__ import annotations

import os
import time
from collections import Counter
from dataclasses import asdict

import cachesvc
from cachesvc.daemon.access.tenants import Peer, admits
from cachesvc.daemon.control.messages import dataset_message
from cachesvc.daemon.control.pins import Pins
from cachesvc.daemon.datasets import ServedDataset
from cachesvc.daemon.runner import Runner
from cachesvc.v1 import cachesvc_pb2 as pb


class Reports:
    """Takes snapshots for threads other than the loop's. A walk over extents reads only and runs on the caller's thread: at
    7 us an extent it is too long for the loop."""

    def __init__(self, runner: Runner, pins: Pins, started: float) -> None:
        self._runner = runner
        self._loop = runner.loop
        self._pins = pins
        self._started = started

    def daemon(self) -> pb.StatusReply:
        """Return the daemon's tiers, readers and fills."""
        return self._loop.call(self._status)

    def nodes(self) -> pb.NodesReply:
        """Return the members of the cluster as the peer agent told them last."""
        link = self._runner.cluster
        if link is None:
            return pb.NodesReply()
        report = link.report
        rows = [
            pb.NodeStatus(**asdict(row), me=row.name == report.me and row.state == "present")
            for row in report.rows
        ]
        return pb.NodesReply(nodes=rows, clustered=True)

    def datasets(self, caller: Peer | None) -> list[pb.DatasetStatus]:
        """Return the datasets that a caller may see."""
        visible = (each for each in self._loop.call(self._runner.listed) if admits(each.rules, caller))
        return [self._dataset_status(dataset) for dataset in visible]

    def _dataset_status(self, dataset: ServedDataset) -> pb.DatasetStatus:
        resident = self._runner.resident(dataset)
        found = self._loop.call(lambda: self._counted(dataset))
        found.dataset.CopyFrom(dataset_message(dataset))
        found.resident_bytes = dataset.bytes_of(extent for extent, _ in resident)
        found.resident_extents = len(resident)
        return found

    def _status(self) -> pb.StatusReply:
        assert self._runner.grants is not None
        status = self._runner.node.status()
        tiers = [
            pb.TierStatus(
                name=tier.tier,
                budget_bytes=tier.budget_bytes,
                used_bytes=tier.used_bytes,
                held_bytes=tier.held_bytes,
                lost=tier.lost,
                stalled=tier.stalled,
                full=tier.full,
                corrupt_extents=tier.corrupt_count,
                scrubbed_bytes=tier.scrubbed_bytes,
            )
            for tier in status.tiers
        ]
        return pb.StatusReply(
            version=cachesvc.__version__,
            pid=os.getpid(),
            uptime_s=time.monotonic() - self._started,
            tiers=tiers,
            readers=self._runner.grants.readers().total(),
            fills_running=status.fills,
            sources=pb.SourceStatus(**asdict(self._runner.source_requests())),
            cluster=self._cluster(),
        )

    def _cluster(self) -> pb.ClusterStatus | None:
        link = self._runner.cluster
        if link is None:
            return None
        states = Counter(row.state for row in link.report.rows)
        return pb.ClusterStatus(
            present=states["present"],
            away=states["away"],
            received_bytes=self._runner.fills.counts.received_bytes,
            sent_bytes=link.report.sent_bytes,
        )

    def _counted(self, dataset: ServedDataset) -> pb.DatasetStatus:
        assert self._runner.grants is not None
        counters = self._runner.node.counters(dataset.id)
        return pb.DatasetStatus(
            readers=self._runner.grants.readers_of(dataset.id),
            pinned=dataset.id in self._pins,
            hits=counters.hits,
            ahead=counters.ahead,
            misses=counters.misses,
            refused=counters.refused,
            source_bytes=self._runner.fills.counts.source_bytes(dataset.id),
            peer_bytes=self._runner.fills.counts.peer_bytes(dataset.id),
            bound=counters.bound,
            kept_bytes=counters.kept_bytes,
            listed_at=self._runner.datasets.stale.get(dataset.id, 0),
            epochs=[
                pb.EpochStatus(
                    number=each.number,
                    touched=each.touched,
                    hits=each.hits,
                    hit_rate=each.hit_rate,
                    bound=each.bound,
                    of_bound=each.of_bound,
                )
                for each in counters.epochs
            ],
        )
