"""A node whose daemons take over from each other, and its data."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from cachesvc.catalog.options import Options
from cachesvc.client.control import Control
from cachesvc.client.grants import DaemonGrants
from cachesvc.client.protocol import Granted
from cachesvc.core.model import DatasetId
from testbed import WAIT_S
from testbed.node import Daemon
from testbed.servers import Proxy, SeaweedFS
from tests.support.training.jobs import Node, Records, Trainer, exactly_once

EXTENT = 1 << 20
EXTENTS = 8
RECORD = 4096
SAMPLES = EXTENTS * EXTENT // RECORD
BATCH = 64
STEPS = SAMPLES // BATCH
LOADING = {"batch_size": BATCH, "shuffle": True, "window": 2 * EXTENT}
OPTIONS = Options(format="records", record_bytes=RECORD)


def serving(tmp_path: Path, s3: SeaweedFS, proxy: Proxy, *more: str) -> Node:
    bucket = s3.create_bucket(f"takeover-{uuid.uuid4().hex[:8]}")
    options = ["--ram", "32MiB", "--allow", f"s3://{bucket}/", "--extent-bytes", str(EXTENT), *more]
    return Node(Daemon(tmp_path / "node", options, s3.env(proxy.endpoint)), proxy, s3, bucket)


def ending_well(found: Node) -> Iterator[Node]:
    with found.daemon:
        yield found
        assert found.daemon.stop() == 0, found.daemon.log
        assert "Traceback" not in found.daemon.log
        assert os.listdir(found.daemon.socket_dir) == ["lock"]


def stored(node: Node) -> Records:
    rows = np.random.default_rng(uuid.uuid4().int).integers(0, 256, (SAMPLES, RECORD), np.uint8)
    uri = node.put({"0.bin": rows.tobytes()})
    node.proxy.reset()
    return Records(uri, rows)


def opened(node: Node, records: Records) -> DatasetId:
    with Control(node.daemon.socket_dir) as control:
        return control.open_dataset([records.uri], OPTIONS).id


def read(grants: DaemonGrants, rows: np.ndarray[Any, Any], *extents: int) -> set[str]:
    """Lease extents and check every byte; return the tiers that they came from."""
    answers = grants.acquire(extents or range(EXTENTS), WAIT_S)
    for answer in answers:
        assert isinstance(answer, Granted)
        found = os.pread(answer.fd, answer.size_bytes, 0)
        os.close(answer.fd)
        assert found == rows.reshape(EXTENTS, -1)[answer.extent].tobytes()
    return {answer.origin for answer in answers if isinstance(answer, Granted)}


@contextmanager
def reading(node: Node, records: Records) -> Iterator[DaemonGrants]:
    """A reader that leases all of a dataset, each byte of which was right."""
    with closing(DaemonGrants(node.daemon.socket_dir, opened(node, records))) as grants:
        read(grants, records.rows)
        yield grants


def taken_over(node: Node, *more: str) -> None:
    before = node.daemon.pid
    node.daemon.take_over(*more)
    assert node.daemon.pid != before


def epochs(trainer: Trainer, rows: np.ndarray[Any, Any], enough: threading.Event) -> int:
    """Take and check whole epochs until `enough` is set; return their number."""
    count = 0
    while not enough.is_set():
        exactly_once(trainer.take(STEPS), rows)
        assert trainer.said()["by_origin"]["direct"] == 0
        count += 1
    return count
