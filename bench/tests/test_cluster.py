"""Rows of the bench of clusters: measured, skipped and failed ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from bench.cluster.rows import HEAD, ROWS, measure
from testbed.cluster import Cluster, Node, by_file
from testbed.servers import SeaweedFS

EXTENTS = 40


@pytest.fixture(scope="module")
def server() -> Iterator[SeaweedFS]:
    with SeaweedFS() as found:
        yield found


@pytest.mark.slow
def test_two_nodes_fetch_once(tmp_path: Path, server: SeaweedFS) -> None:
    told: list[str] = []
    table, good = measure(["cold2"], tmp_path, server, by_file, EXTENTS, told.append)
    (row,) = table.rows
    assert row[:2] == ("cold2", "1.00 D")
    assert good
    assert len(told) == 1


@pytest.mark.slow
def test_a_cluster_that_does_not_start_is_a_row_that_failed(tmp_path: Path, server: SeaweedFS) -> None:
    def wrong(cluster: Cluster, node: Node) -> Sequence[str]:
        return ["--absent"]

    table, good = measure(["cold2"], tmp_path, server, wrong, EXTENTS, lambda row: None)
    (row,) = table.rows
    assert dict(zip(HEAD, row))["measured"] == "FAILED"
    assert "--absent" in dict(zip(HEAD, row))["what was run"]
    assert not good
    assert set(ROWS) >= {"cold2", "zones"}
