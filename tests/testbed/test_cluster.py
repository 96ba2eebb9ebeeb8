"""A cluster of real daemons: its source counts, its nodes end and come back, its links are shaped and cut."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cachesvc.core.errors import DaemonUnavailable
from testbed.cluster import Cluster, Kind
from testbed.namespaces import Network, Unavailable
from testbed.ranks import Ranks
from testbed.servers import Fault, SeaweedFS
from tests.support.waiting import wait_until

EXTENT = 64 << 10
EXTENTS = 40


@pytest.fixture(scope="module", params=["loopback", pytest.param("namespaces", marks=pytest.mark.slow)])
def kind(request: pytest.FixtureRequest) -> Kind:
    if request.param == "namespaces":
        try:
            with Network():
                pass
        except Unavailable as error:
            pytest.skip(str(error))
    return request.param


@pytest.fixture(scope="module")
def cluster(kind: Kind, tmp_path_factory: pytest.TempPathFactory, s3_server: SeaweedFS) -> Iterator[Cluster]:
    root = tmp_path_factory.mktemp("cluster")
    with Cluster(root, 2, 16 << 20, kind=kind, server=s3_server) as found:
        found.wait_settled()
        yield found


def test_nodes_share_what_one_of_them_fetched(cluster: Cluster) -> None:
    records = cluster.source.fill(EXTENTS, EXTENT, "shared")
    first, second = cluster.nodes
    assert first.prefetch(records).source_bytes == records.size_bytes
    counted = cluster.source.counts.bytes
    assert counted >= records.size_bytes
    assert set(cluster.source.gets().values()) == {1}
    assert second.prefetch(records).peer_bytes == records.size_bytes
    assert cluster.source.counts.bytes < counted + EXTENT


def test_ranks_read_each_extent_once_while_a_node_is_killed(cluster: Cluster) -> None:
    records = cluster.source.fill(EXTENTS, EXTENT, "ranks")

    def kill(epoch: int) -> None:
        if epoch == 0:
            cluster.nodes[1].kill()
            cluster.nodes[1].launch()

    ledger = Ranks(cluster.nodes, records).read(2, between=kill)
    assert ledger.faults(2) == []
    assert {step.rank for step in ledger.steps} == {0, 1}


def test_the_node_that_fetches_is_known(cluster: Cluster) -> None:
    records = cluster.source.fill(1, EXTENT, "held")
    held = Fault("hold", times=100, path="held/")
    cluster.source.proxy.faults.append(held)
    with ThreadPoolExecutor(1) as pool:
        try:
            filling = pool.submit(cluster.nodes[1].prefetch, records)
            wait_until(lambda: cluster.fetching() == [cluster.nodes[1]], 30.0)
        finally:
            held.times = 0
            held.until.set()
        assert filling.result().resident_extents == 1
    wait_until(lambda: cluster.fetching() == [])


def test_a_node_leaves_and_joins(cluster: Cluster) -> None:
    first, second = cluster.nodes
    cluster.leave(1)
    assert cluster.members_file.read_text() == f"{first.address}\n"
    cluster.join(1)
    assert cluster.members_file.read_text() == f"{first.address}\n{second.address}\n"
    cluster.wait_settled()


def test_a_paused_node_answers_again_after_it(cluster: Cluster) -> None:
    node = cluster.nodes[0]
    pid = node.status().pid
    node.pause()
    wait_until(lambda: Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] == "T")
    node.resume()
    assert node.status().pid == pid


def test_a_node_can_be_killed_while_it_is_paused(cluster: Cluster) -> None:
    node = cluster.nodes[0]
    node.pause()
    node.kill()
    with pytest.raises(DaemonUnavailable):
        node.status()
    node.start()
    assert node.status().pid == node.pid
