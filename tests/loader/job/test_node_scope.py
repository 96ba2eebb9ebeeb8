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

from loader.batches.held_parts import taken
from testbed.cluster import Cluster, Node
from testbed.servers import SeaweedFS, free_ports
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
                moved = cluster.source.counts.bytes, _received(cluster)
                if epochs[0] == 0 == said[0][0]:
                    first = moved
                assert moved == first, f"{moved} after {said[0][0]}, {first} after epoch 0"
        assert all(sorted(rows) == list(range(len(digests))) for rows in seen.values())
        assert FILES * FILE <= first[0] <= 1.05 * FILES * FILE
        assert [len(each) for each in parts[0]] == [FILES * FILE // EXTENT // NODES] * NODES
        assert parts[3] == [parts[0][at] for at in (2, 0, 3, 1)], "each host reads what it read before"
