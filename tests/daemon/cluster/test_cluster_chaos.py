"""Readers on every node of a cluster get each extent once, with the right bytes, whatever happens to nodes and links."""

from __future__ import annotations

from pathlib import Path

import pytest

from testbed.chaos import Chaos, schedule
from testbed.cluster import Cluster, Kind
from testbed.namespaces import Unavailable
from testbed.servers import SeaweedFS

EXTENT = 64 << 10
NODES = 4
SHARE = 0.5
"""The room of each node as a part of the data, half of it RAM."""


def survive(
    root: Path, server: SeaweedFS, kind: Kind, extents: int, epochs: int, events: int, seed: int
) -> None:
    """Read epochs during events; print the longest step."""
    room = int(SHARE * extents * EXTENT)
    try:
        cluster = Cluster(root, NODES, room // 2, room // 2, EXTENT, kind, server=server)
        with cluster:
            cluster.wait_settled()
            records = cluster.source.fill(extents, EXTENT)
            chaos = Chaos(cluster)
            planned = schedule(seed, events, NODES, extents * epochs, links=kind == "namespaces")
            ledger = chaos.read(records, epochs, planned)
    except Unavailable as error:
        pytest.skip(str(error))
    longest = ledger.longest
    print(f"{len(chaos.done)} events, seed {seed}: the longest step took {longest.took_s:.2f} s, {longest}")
    told = "\n".join(chaos.done)
    assert ledger.faults(epochs) == [], (
        f"seed {seed}, {kind}, {extents} extents, {epochs} epochs after\n{told}"
    )
    assert len(chaos.done) == events


@pytest.mark.slow
def test_a_few_faults_cost_no_reader_an_extent(tmp_path: Path, s3_server: SeaweedFS) -> None:
    survive(tmp_path / "cluster", s3_server, "loopback", extents=160, epochs=2, events=5, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["loopback", "namespaces"])
@pytest.mark.parametrize("seed", [1, 2])
def test_fifty_faults_cost_no_reader_an_extent(
    tmp_path: Path, s3_server: SeaweedFS, kind: Kind, seed: int
) -> None:
    survive(tmp_path / "cluster", s3_server, kind, extents=1000, epochs=5, events=50, seed=seed)
