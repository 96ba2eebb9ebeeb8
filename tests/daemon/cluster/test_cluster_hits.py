"""The nodes of a cluster together keep what none of them could keep alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from testbed.cluster import Cluster
from testbed.ranks import Ranks

EXTENTS, EXTENT_BYTES = 240, 64 << 10
NODES = 3
SPARE = 8
"""Extents of room beside a node's part: the window, and what chance adds to a part."""
MOST_EPOCHS = 100
"""A node that a busy machine holds up for two seconds is away for some epochs, and its part is read from the source."""


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
