"""Daemons of one static cluster over a bucket of a fake S3 server, each with a key of its own, so that the server can treat
one of them in another way."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from cachesvc.catalog.options import Options
from cachesvc.client.control import Control
from cachesvc.core.model import DatasetId
from loader import DataLoader, open_dataset
from testbed.node import Daemon
from testbed.servers import two_ports
from tests.support.faults.fake_s3 import FakeS3, Object

EXTENT, EXTENTS, RECORD = 256 << 10, 8, 4096
URI = "s3://bucket/d/"
CONTENTS = np.random.default_rng(3).bytes(EXTENTS * EXTENT)
OPTIONS = Options(format="records", record_bytes=RECORD)


class Cluster:
    """Daemons of one static cluster over a bucket, each with its own key. All know the node `behind` at 127.0.0.2."""

    def __init__(self, root: Path, server: FakeS3, names: str, behind: str = "") -> None:
        self._root, self._server = root, server
        self.ports = {name: two_ports() for name in names}
        known = (f"127.0.0.{1 + (name == behind)}:{port}" for name, port in self.ports.items())
        self._members = f"static:{','.join(known)}"

    def node(self, name: str, *more: str) -> Daemon:
        """A daemon that is not started; `more` are further options."""
        given = ["--ram", "8MiB", "--extent-bytes", str(EXTENT), "--fillers", "1", "--allow", "s3://bucket/"]
        member = ["--cluster", self._members, "--node-name", name]
        environment = {
            "AWS_ACCESS_KEY_ID": f"KEY{name}",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_ENDPOINT_URL": self._server.endpoint,
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        options = [*given, *member, "--advertise", f"127.0.0.1:{self.ports[name]}"]
        return Daemon(self._root / name, [*options, *more], environment)


def bucket(server: FakeS3) -> None:
    """Put the one object into the bucket."""
    server.objects["d/0.bin"] = Object(len(CONTENTS), data=CONTENTS)


def states(daemon: Daemon) -> dict[str, str]:
    """The state of each member as a node sees it."""
    with Control(daemon.socket_dir) as control:
        return {node.name: node.state for node in control.nodes().nodes}


def read(daemon: Daemon) -> bytes:
    """Read every record in order through the loader."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CACHESVC_SOCKET", daemon.socket_dir)
        dataset = open_dataset(URI, format="records", record_bytes=RECORD)
        found = b"".join(np.asarray(batch).tobytes() for batch in DataLoader(dataset, batch_size=16))
        dataset.close()
    return found


def opened(daemon: Daemon) -> DatasetId:
    """Open the dataset, and return its id."""
    with Control(daemon.socket_dir) as control:
        return control.open_dataset([URI], OPTIONS).id


def recorded(daemon: Daemon, kind: str, node: str) -> str:
    """The log line of an event about a node; "" for none."""
    found = re.search(rf"event={kind} (.* )?node={node} .*", daemon.log)
    return found[0] if found else ""


def bytes_from_source(daemon: Daemon) -> int:
    """The bytes that a node has fetched from the source."""
    with Control(daemon.socket_dir) as control:
        (status,) = control.status().datasets
    return status.source_bytes


def prefetch(daemon: Daemon) -> None:
    """Fill a node with all extents."""
    with Control(daemon.socket_dir) as control:
        list(control.prefetch(opened(daemon)))
