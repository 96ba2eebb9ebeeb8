"""A node that leaves for good hands on what it alone holds, while others read: by command, and when it is stopped."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from cachesvc.__main__ import run
from cachesvc.client.control import Control
from cachesvc.daemon.events.journal import read_events
from cachesvc.v1 import cachesvc_pb2 as pb
from testbed import WAIT_S
from testbed.cluster import Cluster, Node, by_file
from testbed.ranks import Ranks
from testbed.records import Records
from tests.support.waiting import wait_until

EXTENT_BYTES = 64 << 10
BUSY, ALONE = 240, 24
"""Extents that jobs read on the other nodes, and that only the node that leaves has."""
RAM = 130 * EXTENT_BYTES
"""Three nodes can hold all, and one cannot."""
MOST_EPOCHS = 100


def uncompared(cluster: Cluster, node: Node) -> list[str]:
    """Options of a node that compares nothing with the source."""
    return [*by_file(cluster, node), "--compare-peers", "0"]


def known(node: Node, records: Records) -> str:
    """Open a dataset on a node; return its id."""
    with Control(node.socket_dir) as control:
        return control.open_dataset([records.uri], records.options).id


def rows(nodes: list[Node], dataset: str) -> list[pb.DatasetStatus]:
    """The status of a dataset on each node."""
    return [row for node in nodes for row in node.status().datasets if row.dataset.id == dataset]


@pytest.mark.slow
def test_a_drain_under_load_moves_each_extent_once_and_the_source_is_not_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Cluster(tmp_path, 4, RAM, extent_bytes=EXTENT_BYTES, options=uncompared) as cluster:
        busy = cluster.source.fill(BUSY, EXTENT_BYTES, "busy")
        alone = cluster.source.fill(ALONE, EXTENT_BYTES, "alone", seed=2)
        cluster.wait_settled()
        *others, leaves = cluster.nodes
        cluster.prefetch(cluster.nodes, busy)
        leaves.prefetch(alone)
        (dataset,) = {known(node, alone) for node in others}
        ranks = Ranks(others, busy)
        found: dict[str, Any] = {}
        read: list[int] = []

        def drains() -> None:
            found["code"] = run(["drain", leaves.name, "--socket", others[0].socket_dir, "--json"])

        draining = threading.Thread(target=drains)

        def between(epoch: int) -> None:
            read.append(cluster.source.counts.bytes)
            if epoch == 0:
                draining.start()
            elif not draining.is_alive():
                found["ends"] = found.get("ends", 0) + 1
                if found["ends"] > 1:  # an epoch that began after the drain
                    ranks.stop()

        ledger = ranks.read(MOST_EPOCHS, between)
        draining.join(WAIT_S)
        assert not ledger.faults(ranks.epochs), "0 failed reads"
        assert found["code"] == 0
        drained = next(
            row for row in map(json.loads, capsys.readouterr().out.splitlines()) if row["event"] == "drained"
        )
        assert drained["moved_extents"] == drained["extents"] >= ALONE
        assert read[-1] == read[0], "the source was not read again"
        taken = rows(others, dataset)
        assert sum(row.resident_extents for row in taken) == ALONE
        assert [sum(row.peer_bytes for row in taken), sum(row.source_bytes for row in taken)] == [
            alone.size_bytes,
            0,
        ]
        assert leaves.process is not None
        assert leaves.process.wait(WAIT_S) == 0
        (event,) = [each for each in read_events(str(leaves.root / "state")) if each.kind == "drained"]
        assert (event.extents, event.size_bytes) == (drained["extents"], drained["size_bytes"])
        wait_until(lambda: all(node.sees() == {each.name for each in others} for node in others))
        with Control(others[0].socket_dir) as control:
            assert leaves.name not in {row.name for row in control.nodes().nodes}, "it is forgotten at once"


@pytest.mark.slow
def test_a_node_that_is_stopped_drains_only_where_it_is_told_to(tmp_path: Path) -> None:
    def options(cluster: Cluster, node: Node) -> list[str]:
        return [*uncompared(cluster, node), *(["--drain-on-stop", "60s"] if node.name == "n1" else [])]

    with Cluster(tmp_path, 3, RAM, extent_bytes=EXTENT_BYTES, options=options) as cluster:
        first = cluster.source.fill(ALONE, EXTENT_BYTES, "first")
        second = cluster.source.fill(ALONE, EXTENT_BYTES, "second", seed=2)
        cluster.wait_settled()
        stays, drains, plain = cluster.nodes
        drains.prefetch(first)
        plain.prefetch(second)
        ids = [known(stays, first), known(stays, second)]
        assert [node.stop() for node in (plain, drains)] == [0, 0]
        held = [sum(row.resident_extents for row in rows([stays], each)) for each in ids]
        assert held == [ALONE, 0], "a stop says goodbye only"
        with Control(stays.socket_dir) as control:
            states = {row.name: row.state for row in control.nodes().nodes}
        assert states == {"n0": "present", "n2": "left"}


@pytest.mark.slow
def test_a_drain_takes_no_room_from_what_others_keep(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Cluster(tmp_path, 2, 40 * EXTENT_BYTES, extent_bytes=EXTENT_BYTES, options=uncompared) as cluster:
        kept = cluster.source.fill(30, EXTENT_BYTES, "kept")
        alone = cluster.source.fill(30, EXTENT_BYTES, "alone", seed=2)
        cluster.wait_settled()
        stays, leaves = cluster.nodes
        stays.prefetch(kept)
        with Control(stays.socket_dir) as control:
            control.pin(control.open_dataset([kept.uri], kept.options).id, True)
        leaves.prefetch(alone)
        known(stays, alone)
        with Control(leaves.socket_dir) as control:  # it ends the call, and the node stays a member
            assert next(control.drain(WAIT_S)).extents == 30

        def weight() -> int:
            with Control(stays.socket_dir) as control:
                return next(row.weight_bytes for row in control.nodes().nodes if row.name == leaves.name)

        wait_until(lambda: weight() == 40 * EXTENT_BYTES)
        code = run(["drain", leaves.name, "--socket", leaves.socket_dir, "--json"])
        out, err = capsys.readouterr()
        drained = json.loads(out.splitlines()[-1])
        assert code == 8
        assert "no room" in err
        assert drained["moved_extents"] < drained["extents"] <= 30
        assert sum(row.resident_extents for row in rows([stays], known(stays, kept))) == 30
        assert 0 < sum(row.resident_extents for row in rows([stays], known(stays, alone))) <= 10
