"""A job with `shuffle_scope="node"` on four nodes moves no byte after its first epoch, also once hosts are renumbered."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from cachesvc.core.errors import InvalidInput, StateMismatch
from loader import DataLoader
from loader.batches.held_parts import taken
from testbed.cluster import Cluster, Node
from testbed.servers import SeaweedFS, free_ports
from tests.support import datasets
from tests.support.training.loader_fakes import compiled, in_memory
from tests.support.training.scoped_rank import RECORD

EXTENT, NODES = 64 << 10, 4
FILE, FILES = 1 << 20, 6
BATCH = 10
"""Leaves samples over: 1,536 records are 38 full batches of 40, and 16."""
Epoch = tuple[int, list[int], list[int], dict[str, Any]]


def test_parts_go_to_those_who_hold_most_of_them() -> None:
    assert taken([[0, 0, 0]] * 3) == [0, 1, 2]
    assert taken([[9, 9, 9]] * 3) == [0, 1, 2], "what is equal stays"
    assert taken([[0, 16, 1], [0, 0, 16], [16, 0, 0]]) == [1, 2, 0]
    assert taken([[0, 3, 0], [0, 8, 0], [0, 0, 0]]) == [0, 1, 2]


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of four hosts with one rank each."""
    for name, value in {"RANK": 0, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 1, "GROUP_WORLD_SIZE": 4}.items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.usefixtures("torchrun")
def test_a_state_names_its_scope_which_may_change_between_epochs(tmp_path: Path) -> None:
    datasets.array_file(tmp_path / "d" / "0.npy", np.arange(1000, dtype="<i8")[:, None])
    data = in_memory(compiled(tmp_path / "d", tmp_path, format="records"))

    def loader(**given: Any) -> DataLoader[Any]:
        return DataLoader(data, 4, shuffle=True, window="all", **given)

    whole, own = loader(), loader(shuffle_scope="node")
    next(iter(whole))
    going = iter(own)
    next(going)
    assert (whole.state_dict()["shuffle_scope"], own.state_dict()["shuffle_scope"]) == ("job", "node")
    assert (whole.state_dict()["canonical_nodes"], own.state_dict()["canonical_nodes"]) == (1, 4)
    resumed = loader()
    resumed.load_state_dict(own.state_dict())
    assert next(iter(resumed)).tolist() == next(going).tolist()
    with pytest.raises(StateMismatch, match="shuffle_scope='job', the loader has shuffle_scope='node'"):
        loader(shuffle_scope="node").load_state_dict(whole.state_dict())
    older = whole.state_dict()
    del older["shuffle_scope"]
    loader().load_state_dict(older)
    list(whole)
    changed = loader(shuffle_scope="node")
    changed.load_state_dict(whole.state_dict())
    assert changed.state_dict()["canonical_nodes"] == 4


@pytest.mark.parametrize("given", [{"shuffle": False}, {"shuffle": True, "shuffle_scope": "rank"}])
def test_a_scope_without_a_shuffle_and_unknown_ones_are_errors(tmp_path: Path, given: dict[str, Any]) -> None:
    datasets.array_file(tmp_path / "d" / "0.npy", np.arange(100, dtype="<i8")[:, None])
    data = in_memory(compiled(tmp_path / "d", tmp_path, format="records"))
    with pytest.raises(InvalidInput, match="shuffle_scope="):
        len(DataLoader(data, 4, **{"shuffle_scope": "node", **given}))


def _job(nodes: Sequence[Node], **job: Any) -> Iterator[list[Epoch]]:
    """Run rank i beside `nodes[i]`; yield what the ranks say after each epoch."""
    (port,) = free_ports(1)
    size = str(len(nodes))
    common = {
        "WORLD_SIZE": size,
        "GROUP_WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
    }
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.support.training.scoped_rank", json.dumps(job)],
                    env={**os.environ, **common, **node.env, "MASTER_PORT": str(port), "RANK": str(rank)},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for rank, node in enumerate(nodes)
        ]
        for each in ranks:
            stack.callback(each.kill)
        for _ in job["epochs"]:
            yield [json.loads(each.stdout.readline()) for each in ranks]  # type: ignore[union-attr]
            for each in ranks:
                print(file=each.stdin, flush=True)
        assert [each.wait() for each in ranks] == [0] * len(ranks)


def _upload(cluster: Cluster, server: SeaweedFS) -> list[int]:
    """Fill the bucket; return the digest of each record."""
    digests = []
    for number in range(FILES):
        body = np.random.default_rng(number).bytes(FILE)
        server.client().put_object(Bucket=cluster.source.bucket, Key=f"d/{number:03}.bin", Body=body)
        digests += [xxh3_64_intdigest(body[at : at + RECORD]) for at in range(0, FILE, RECORD)]
    return digests


def _received(cluster: Cluster) -> int:
    return sum(node.status().cluster.received_bytes for node in cluster.nodes)


@pytest.mark.slow
def test_no_byte_moves_after_the_first_epoch(tmp_path: Path, s3_server: SeaweedFS) -> None:
    room = FILES * FILE // NODES * 5 // 4
    with Cluster(tmp_path, NODES, ram=room, extent_bytes=EXTENT, server=s3_server) as cluster:
        cluster.wait_settled()
        digests, job = _upload(cluster, s3_server), {"uri": f"{cluster.source.prefix}d/", "batch_size": BATCH}
        seen: dict[int, list[int]] = {0: [], 1: [], 2: []}
        parts: list[list[set[int]]] = []
        state = None
        for nodes, epochs, leave in (
            (cluster.nodes, [0, 1], 17),
            ([cluster.nodes[at] for at in (2, 0, 3, 1)], [1, 2], None),
        ):
            for said in _job(nodes, **job, epochs=epochs, state=state, leave=leave):
                for epoch, rows, found, _ in said:
                    assert found == [digests[row] for row in rows]
                    seen[epoch] += rows
                parts.append([{row * RECORD // EXTENT for row in rows} for _, rows, _, _ in said])
                state = said[0][3]
                assert all(each[3] == state for each in said)
                moved = sum(cluster.source.gets().values()), _received(cluster)
                if epochs[0] == 0 == said[0][0]:
                    first = moved
                assert moved == first, f"{moved} after {said[0][0]}, {first} after epoch 0"
        assert all(sorted(rows) == list(range(len(digests))) for rows in seen.values())
        assert cluster.source.counts.bytes <= 1.05 * FILES * FILE
        assert [len(each) for each in parts[0]] == [FILES * FILE // EXTENT // NODES] * NODES
        assert parts[3] == [parts[0][at] for at in (2, 0, 3, 1)], "each host reads what it read before"
