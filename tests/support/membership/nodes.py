"""Daemons of a static cluster on loopback, with certificates and without, and what each sees of the others."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
import trustme

from cachesvc.catalog.options import Options
from cachesvc.client.control import Control
from cachesvc.core.model import DatasetId
from cachesvc.v1 import cachesvc_pb2 as pb
from testbed import WAIT_S
from testbed.node import Daemon
from testbed.servers import two_ports
from tests.support.waiting import wait_until

EXTENT = 256 << 10
EXTENTS = 8
RECORD = 4096
OPTIONS = Options(format="records", record_bytes=RECORD)


class Nodes:
    """Daemons of one static cluster over `data`, not yet started."""

    def __init__(self, root: Path, names: str = "ab") -> None:
        self.root, self.data = root, root / "data"
        self.data.mkdir()
        self.contents = np.random.default_rng(1).bytes(EXTENTS * EXTENT)
        self.size = len(self.contents)
        (self.data / "0.bin").write_bytes(self.contents)
        self.addresses = {name: f"127.0.0.1:{two_ports()}" for name in names}

    def node(
        self,
        name: str,
        *more: str,
        ram: str = "8MiB",
        credentials: dict[str, str] | None = None,
        at: str = "",
    ) -> Daemon:
        """The daemon of a name, or another one that takes the name."""
        given = ["--ram", ram, "--extent-bytes", str(EXTENT), "--fillers", "1", "--allow", f"{self.data}/"]
        member = ["--cluster", f"static:{','.join(self.addresses.values())}", "--node-name", name]
        options = [*given, *member, "--advertise", self.addresses[at or name], *more]
        return Daemon(self.root / (at or name), options, credentials)


def states(daemon: Daemon) -> dict[str, str]:
    """The state of each member as a node sees it."""
    with Control(daemon.socket_dir) as control:
        return {node.name: node.state for node in control.nodes().nodes}


def meet(*daemons: Daemon) -> None:
    """Wait until each node sees all others."""
    wait_until(lambda: all(list(states(each).values()) == ["present"] * len(daemons) for each in daemons))


@contextmanager
def pair(nodes: Nodes, *more: str) -> Iterator[tuple[Daemon, Daemon]]:
    """Two nodes that see each other, of which the first has all the data."""
    with nodes.node("a", *more) as other, nodes.node("b", *more) as node:
        meet(other, node)
        assert fill(other, nodes.data)[1].resident_extents == EXTENTS
        yield other, node


def fill(daemon: Daemon, data: Path) -> tuple[DatasetId, pb.PrefetchReply]:
    with Control(daemon.socket_dir) as control:
        dataset = control.open_dataset([f"{data}/"], OPTIONS).id
        return dataset, list(control.prefetch(dataset))[-1]


def rows(daemon: Daemon) -> Sequence[pb.NodeStatus]:
    """The members as a node sees them."""
    with Control(daemon.socket_dir) as control:
        return control.nodes().nodes


def metric(address: str, name: str) -> float:
    """A metric of a daemon."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=WAIT_S) as answer:
        found = re.search(rf"^{re.escape(name)} (\S+)$", answer.read().decode(), re.M)
    assert found is not None
    return float(found[1])


def certified(
    folder: Path,
    name: str,
    signed_by: trustme.CA,
    host: str = "127.0.0.1",
    ends: datetime | None = None,
) -> list[str]:
    """Options for a node with a certificate in a folder, beside the `ca.pem` that it trusts."""
    issued = signed_by.issue_cert(host, not_before=datetime(2020, 1, 1, tzinfo=timezone.utc), not_after=ends)
    issued.private_key_pem.write_to_path(str(folder / f"{name}.key"))
    issued.cert_chain_pems[0].write_to_path(str(folder / f"{name}.pem"))
    files = {"--tls-key": f"{name}.key", "--tls-cert": f"{name}.pem", "--tls-ca": "ca.pem"}
    return [word for option, file in files.items() for word in (option, str(folder / file))]


def authority(folder: Path) -> trustme.CA:
    """Replace the trusted authority by another one."""
    ca = trustme.CA()
    ca.cert_pem.write_to_path(str(folder / "ca.pem"))
    return ca


def cmdline(pid: int) -> bytes:
    """The command line of a process, empty for one that has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def agent_of(daemon: Daemon) -> int:
    """The process id of the peer agent; 0 where there is none at the moment."""
    assert daemon.process is not None
    children: list[int] = []
    for thread in Path(f"/proc/{daemon.pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # the process has ended
            children += map(int, (thread / "children").read_text().split())
    return next((each for each in children if b"peers.agent" in cmdline(each)), 0)
