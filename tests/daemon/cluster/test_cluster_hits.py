"""The nodes of a cluster together keep what none of them could keep alone, also when their membership was away for
long."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from testbed.cluster import Cluster, Node
from testbed.ranks import Ranks
from tests.support.membership.sources import EtcdSource

EXTENTS, EXTENT_BYTES = 240, 64 << 10
NODES = 3
SPARE = 8
"""Extents of room beside a node's part: the window, and what chance adds to a part."""
OUTAGE_S = 600.0
END = 3
"""The first epoch after the outage's end. The third, 2, is after ten minutes of the outage."""
MOST_EPOCHS = 100
"""A node that a busy machine holds up for two seconds is away for some epochs, and its part is read from the source."""


@pytest.mark.slow
def test_an_epoch_over_all_nodes_costs_the_source_nothing_where_they_hold_all_data(tmp_path: Path) -> None:
    ram = (EXTENTS // NODES + 2 * SPARE) * EXTENT_BYTES
    fetched: list[int] = []
    with Cluster(tmp_path, nodes=NODES, ram=ram, extent_bytes=EXTENT_BYTES) as cluster:
        records = cluster.source.fill(EXTENTS, EXTENT_BYTES, "data")
        cluster.wait_settled()
        ranks = Ranks(cluster.nodes, records)

        def between(epoch: int) -> None:
            fetched.append(cluster.source.counts.bytes)
            if epoch and fetched[-1] - fetched[-2] <= 0.03 * EXTENTS * EXTENT_BYTES:
                ranks.stop()

        ledger = ranks.read(MOST_EPOCHS, between)
    assert not ledger.faults(ranks.epochs)
    assert fetched[0] <= 1.05 * EXTENTS * EXTENT_BYTES
    assert ranks.epochs < MOST_EPOCHS, fetched


@pytest.mark.slow
def test_a_prefetch_counts_what_other_nodes_keep(tmp_path: Path) -> None:
    ram = (EXTENTS // 2 + 2 * SPARE) * EXTENT_BYTES
    with Cluster(tmp_path, nodes=NODES, ram=ram, extent_bytes=EXTENT_BYTES) as cluster:
        records = cluster.source.fill(EXTENTS, EXTENT_BYTES, "data")
        cluster.wait_settled()
        replies = cluster.prefetch(cluster.nodes, records)
    for reply in replies:
        assert reply.done
        assert reply.cluster_extents > 0
        assert reply.resident_extents + reply.cluster_extents == EXTENTS


@pytest.mark.slow
def test_ten_minutes_without_etcd_cost_no_read(tmp_path: Path) -> None:
    """Nodes read in the first seconds of the outage, where one of them also starts anew, and after ten minutes of it."""
    etcd = EtcdSource(tmp_path)

    def by_etcd(cluster: Cluster, node: Node) -> Sequence[str]:
        return ["--cluster", etcd.spec, "--node-name", node.name, "--advertise", node.address]

    ram = (EXTENTS // NODES + 2 * SPARE) * EXTENT_BYTES
    fetched: list[int] = []
    try:
        etcd.start()
        with Cluster(tmp_path / "cluster", NODES, ram, extent_bytes=EXTENT_BYTES, options=by_etcd) as cluster:
            records = cluster.source.fill(EXTENTS, EXTENT_BYTES, "data")
            cluster.wait_settled()

            def begin() -> None:
                etcd.lose()
                cluster.nodes[1].kill()
                cluster.nodes[1].start()

            def end() -> None:
                etcd.start()
                cluster.wait_settled()

            events: dict[int, Callable[[], None]] = {0: begin, 1: lambda: time.sleep(OUTAGE_S), 2: end}

            def between(epoch: int) -> None:
                fetched.append(cluster.source.counts.bytes)
                events.get(epoch, lambda: None)()
                if epoch > END and fetched[-1] - fetched[-2] <= 0.03 * EXTENTS * EXTENT_BYTES:
                    ranks.stop()

            ranks = Ranks(cluster.nodes, records)
            ledger = ranks.read(MOST_EPOCHS, between)
            cluster.wait_settled()
    finally:
        etcd.lose()
    assert ledger.faults(ranks.epochs) == []
    assert ranks.epochs < MOST_EPOCHS, fetched
