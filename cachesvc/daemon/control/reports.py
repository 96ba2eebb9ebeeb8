"""Builds the status messages of the daemon and its datasets."""

from __future__ import annotations

import os
import time
from collections import Counter

import cachesvc
from cachesvc.core.node.node import Node
from cachesvc.daemon.access.tenants import Peer, admits
from cachesvc.daemon.control.messages import dataset_message, message_of
from cachesvc.daemon.control.pins import Pins
from cachesvc.daemon.datasets import Datasets, ServedDataset
from cachesvc.daemon.fills.fill_counts import FillCounts
from cachesvc.daemon.fills.pool import FillerPool
from cachesvc.daemon.grants.server import GrantsServer
from cachesvc.daemon.loop.loop import Loop
from cachesvc.daemon.peers.cluster_link import ClusterLink
from cachesvc.daemon.residency import resident
from cachesvc.v1 import cachesvc_pb2 as pb

READ_FROM = ("present", "slow", "unreadable")
"""The states of members that answer."""


class Reports:
    """Takes snapshots for threads other than the loop's. `cluster` is None without one."""

    def __init__(
        self,
        loop: Loop,
        node: Node,
        datasets: Datasets,
        pins: Pins,
        grants: GrantsServer,
        counts: FillCounts,
        fillers: FillerPool,
        cluster: ClusterLink | None,
    ) -> None:
        self._loop, self._node = loop, node
        self._datasets, self._pins, self._grants = datasets, pins, grants
        self._counts, self._fillers, self._cluster = counts, fillers, cluster
        self._started = time.monotonic()

    def daemon(self) -> pb.StatusReply:
        """Return the daemon's tiers, readers and fills."""
        return self._loop.call(self._status)

    def nodes(self) -> pb.NodesReply:
        """Return the members of the cluster as the peer agent told them last."""
        if self._cluster is None:
            return pb.NodesReply()
        report = self._cluster.report
        rows = [
            message_of(pb.NodeStatus, row, me=row.name == report.me and row.state in READ_FROM)
            for row in report.rows
        ]
        return pb.NodesReply(nodes=rows, clustered=True)

    def datasets(self, caller: Peer | None) -> list[pb.DatasetStatus]:
        """Return the datasets that a caller may see."""
        listed = self._loop.call(lambda: self._datasets.listed(self._grants.readers()))
        return [self._dataset_status(dataset) for dataset in listed if admits(dataset.rules, caller)]

    def _dataset_status(self, dataset: ServedDataset) -> pb.DatasetStatus:
        here, message = resident(self._node, dataset), dataset_message(dataset)
        found = self._loop.call(lambda: self._counted(dataset, message))
        found.resident_bytes = dataset.bytes_of(extent for extent, _ in here)
        found.resident_extents = len(here)
        return found

    def _status(self) -> pb.StatusReply:
        status = self._node.status()
        tiers = [
            message_of(pb.TierStatus, tier, name=tier.tier, corrupt_extents=tier.corrupt_count)
            for tier in status.tiers
        ]
        return pb.StatusReply(
            version=cachesvc.__version__,
            pid=os.getpid(),
            uptime_s=time.monotonic() - self._started,
            tiers=tiers,
            readers=self._grants.readers().total(),
            fills_running=status.fills,
            sources=message_of(pb.SourceStatus, self._fillers.source_requests),
            cluster=self._cluster_status(),
        )

    def _cluster_status(self) -> pb.ClusterStatus | None:
        if self._cluster is None:
            return None
        report, received_bytes = self._cluster.report, self._counts.received_bytes
        states = Counter(row.state for row in report.rows)
        return message_of(
            pb.ClusterStatus,
            report,
            received_bytes=received_bytes,
            present=states["present"],
            away=states["away"],
        )

    def _counted(self, dataset: ServedDataset, message: pb.Dataset) -> pb.DatasetStatus:
        counters = self._node.counters(dataset.id)
        return message_of(
            pb.DatasetStatus,
            counters,
            dataset=message,
            readers=self._grants.readers()[dataset.id],
            pinned=dataset.id in self._pins,
            source_bytes=self._counts.source_bytes(dataset.id),
            peer_bytes=self._counts.peer_bytes(dataset.id),
            listed_at=self._datasets.stale.get(dataset.id, 0),
            epochs=[message_of(pb.EpochStatus, each) for each in counters.epochs],
        )
