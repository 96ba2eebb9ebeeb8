"""`--cluster`: verbs on all members of real clusters, by way of one daemon; dead nodes, and other users."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cachesvc.__main__ import run
from cachesvc.client.control import Control
from cachesvc.core.model import DatasetId
from testbed.cluster import Cluster, Node, by_file
from tests.support.users import BOB, as_root, as_user
from tests.support.waiting import wait_until

EXTENTS, EXTENT_BYTES = 24, 64 << 10
SIZE = EXTENTS * EXTENT_BYTES
Verb = Callable[..., tuple[int, list[dict[str, Any]], str]]


@pytest.fixture
def verb(capsys: pytest.CaptureFixture[str]) -> Verb:
    """Run a verb with `--cluster --json` at a node; return the exit code, the rows of stdout, and stderr."""

    def at(node: Node, *words: str) -> tuple[int, list[dict[str, Any]], str]:
        code = run([*words, "--cluster", "--json", "--socket", node.socket_dir])
        out, err = capsys.readouterr()
        return code, [json.loads(line) for line in out.splitlines()], err

    return at


def resident(node: Node) -> int:
    """The bytes of datasets that a node holds, also of those that it has not loaded since its start."""
    return sum(tier.used_bytes for tier in node.status().tiers)


@pytest.mark.slow
def test_verbs_reach_all_members_name_the_dead_one_and_evict_when_it_is_back(
    tmp_path: Path, verb: Verb
) -> None:
    with Cluster(tmp_path, nodes=4, ram=0, nvme=2 * SIZE, extent_bytes=EXTENT_BYTES) as cluster:
        records = cluster.source.fill(EXTENTS, EXTENT_BYTES)
        data = [records.uri, "--format", "records", "--record-bytes", str(EXTENT_BYTES)]
        cluster.wait_settled()
        first, *_, dead = cluster.nodes
        names = {node.name for node in cluster.nodes}
        code, rows, err = verb(first, "prefetch", *data)
        ends = {row["node"]: row["resident"] for row in rows if row["event"] == "prefetched"}
        assert (code, ends, err) == (0, dict.fromkeys(names, True), "")
        assert cluster.source.counts.bytes <= 1.1 * SIZE, "the nodes fetched from one another"
        assert [resident(node) for node in cluster.nodes] == [SIZE] * 4
        for words in (["status"], ["ls"], ["verify", *data], ["pin", *data], ["unpin", *data]):
            code, rows, err = verb(first, *words)
            assert (code, {row["node"] for row in rows}, err) == (0, names, "")
        dead.kill()
        code, rows, err = verb(first, "verify", *data)
        assert (code, {row["node"] for row in rows}) == (10, names - {dead.name})
        assert all(row["checked_extents"] == EXTENTS for row in rows)
        code, rows, err = verb(first, "evict", *data)
        assert code == 10
        assert {row["node"]: row["evicted_bytes"] for row in rows if row["event"] == "evicted"} == (
            dict.fromkeys(names - {dead.name}, SIZE)
        )
        assert rows[-1]["nodes"] == [dead.name]
        (error,) = map(json.loads, err.splitlines())
        assert (error["node"], error["code"]) == (dead.name, 10)
        first.kill()  # what is kept is on disk
        first.start()
        dead.start()
        wait_until(lambda: resident(dead) == 0)
        wait_until(lambda: dead.name in first.sees())
        code, _, err = verb(first, "status")
        assert (code, err) == (0, "")


@pytest.mark.slow
def test_a_detached_prefetch_outlives_its_command_and_the_daemon_until_it_is_cancelled(
    tmp_path: Path, verb: Verb
) -> None:
    with Cluster(tmp_path, nodes=2, ram=0, nvme=2 * SIZE, extent_bytes=EXTENT_BYTES) as cluster:
        records = cluster.source.fill(EXTENTS, EXTENT_BYTES)
        data = [records.uri, "--format", "records", "--record-bytes", str(EXTENT_BYTES)]
        cluster.wait_settled()
        first, _ = cluster.nodes

        def states(wanted: str) -> dict[str, str]:
            _, rows, _ = verb(first, "prefetches")
            return {row["node"]: row["state"] for row in rows if row["id"] == wanted}

        cluster.source.proxy.rate = EXTENT_BYTES / 4
        code, rows, _ = verb(first, "prefetch", *data, "--detach")
        (prefetch,) = {row["prefetch"] for row in rows if row["event"] == "started"}
        assert (code, states(prefetch)) == (0, {"n0": "running", "n1": "running"})
        first.kill()
        first.start()
        cluster.wait_settled()
        assert states(prefetch) == {"n0": "running", "n1": "running"}
        assert verb(first, "cancel", prefetch)[0] == 0
        wait_until(lambda: set(states(prefetch).values()) == {"ended"})
        assert verb(first, "cancel", prefetch)[0] == 4, "it is not under way any more"
        assert resident(first) < SIZE
        cluster.source.proxy.rate = 0.0
        _, rows, _ = verb(first, "prefetch", *data, "--detach")
        (prefetch,) = {row["prefetch"] for row in rows if row["event"] == "started"}
        wait_until(lambda: states(prefetch) == {"n0": "done", "n1": "done"})
        assert [resident(node) for node in cluster.nodes] == [SIZE, SIZE]


@as_root
@pytest.mark.slow
def test_only_the_daemons_own_user_changes_other_nodes(tmp_path: Path) -> None:
    def options(cluster: Cluster, node: Node) -> list[str]:
        return [*by_file(cluster, node), "--socket-mode", "666"]

    with Cluster(tmp_path, nodes=2, ram=2 * SIZE, extent_bytes=EXTENT_BYTES, options=options) as cluster:
        records = cluster.source.fill(EXTENTS, EXTENT_BYTES)
        cluster.wait_settled()
        first, other = cluster.nodes
        other.prefetch(records)
        (dataset,) = [row.dataset.id for row in other.status().datasets]
        directory, name = first.socket_dir, other.name
        os.chmod(directory, 0o755)

        def looks() -> list[str]:
            with Control(directory, name) as control:
                return [row.dataset.id for row in control.list()]

        def evicts() -> None:
            with Control(directory, name) as control:
                control.evict(DatasetId(dataset))

        def evicts_later() -> None:
            with Control(directory) as control:
                control.evict_later([name], [DatasetId(dataset)])

        assert as_user(BOB, looks) == [dataset]
        assert as_user(BOB, evicts)[0] == as_user(BOB, evicts_later)[0] == "NotAllowed"
        assert resident(other) == SIZE
        evicts()
        assert resident(other) == 0
