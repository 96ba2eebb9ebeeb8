"""A membership that is away for long costs no read, and hits come back after its return."""

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
