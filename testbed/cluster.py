"""N nodes as real daemons before one S3 server, on loopback or in network namespaces.

    with Cluster(root, nodes=4, ram=64 << 20, extent_bytes=64 << 10) as cluster:
        records = cluster.source.fill(extents=1000, extent_bytes=64 << 10)
        cluster.prefetch(cluster.nodes, records)
        assert cluster.source.counts.bytes <= 1.02 * records.size_bytes
        cluster.nodes[2].kill()

Clients talk to the Unix sockets of each node from outside. On loopback all nodes have one address and different ports;
links can be shaped and cut in namespaces only.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Literal

import psutil
import trustme

from cachesvc.client.control import Control
from cachesvc.v1 import cachesvc_pb2 as pb
from testbed import WAIT_S
from testbed.namespaces import Link, Network, Unavailable, Way, inside
from testbed.node import Daemon
from testbed.records import Records, Source
from testbed.servers import SeaweedFS, two_ports
from testbed.traffic import Traffic

Kind = Literal["loopback", "namespaces"]
PORT = 7070
"""The port of each node in a namespace."""
NO_LINKS = "only nodes in network namespaces have links, and these are on loopback"
MAX_NODES = 32
TLS_NAME = "peers.cachesvc"
"""The name in the certificate that all nodes share."""


class Node(Daemon):
    """A daemon with a name, an address for peers and a zone. Its options are asked for anew at each start."""

    def __init__(
        self,
        root: Path,
        name: str,
        address: str,
        link: Link | None,
        options: Callable[[Node], Sequence[str]],
        credentials: Mapping[str, str],
    ) -> None:
        super().__init__(root, (), credentials)
        self.name, self.address, self.zone = name, address, ""
        self._link = link
        self._choose = options
        self._paused: list[psutil.Process] = []

    @property
    def link(self) -> Link:
        """Its link to the others. Raises Unavailable on loopback."""
        if self._link is None:
            raise Unavailable(
                "links can be shaped in network namespaces only, and these nodes are on loopback"
            )
        return self._link

    def command(self) -> list[str]:
        """The daemon's command line."""
        return self.beside([*super().command(), *self._choose(self)])

    def beside(self, command: Sequence[str]) -> list[str]:
        """The command line that runs `command` in this node's namespace, if it has one."""
        return inside(self._link.namespace, *command) if self._link else list(command)

    def pause(self) -> None:
        """Stop the daemon and its child processes by SIGSTOP."""
        daemon = psutil.Process(self.pid)
        self._paused = [daemon, *daemon.children(recursive=True)]
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """End a pause."""
        self._signal(signal.SIGCONT)
        self._paused = []

    def kill(self) -> None:
        """Send SIGKILL to the daemon and wait; its child processes end by themselves, also those of a paused one."""
        super().kill()
        self.resume()

    def stop(self) -> int:
        """Send SIGTERM and wait; return the exit code. A pause ends first."""
        self.resume()
        return super().stop()

    def status(self) -> pb.StatusReply:
        """The daemon's status. Raises DaemonUnavailable."""
        with Control(self.socket_dir) as control:
            return control.status()

    def prefetch(self, records: Records) -> pb.PrefetchReply:
        """Fill this node with a dataset; return the last reply."""
        with Control(self.socket_dir) as control:
            *_, last = control.prefetch(control.open_dataset([records.uri], records.options).id)
            return last

    def sees(self) -> set[str]:
        """The names of the members that are present for it, itself included. Raises DaemonUnavailable."""
        with Control(self.socket_dir) as control:
            return {node.name for node in control.nodes().nodes if node.state == "present"}

    def has_made(self, connections: Set[tuple[str, int]]) -> bool:
        """Whether one of its processes has made one of these connections, given by their addresses at its end."""
        if self._link:
            return any(host == self._link.address for host, _ in connections)
        for process in [psutil.Process(self.pid), *psutil.Process(self.pid).children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                if any(each.laddr in connections for each in process.net_connections("tcp4")):
                    return True
        return False

    def _signal(self, number: signal.Signals) -> None:
        for process in self._paused:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)


class Cluster:
    """Nodes and their source. Context manager. Raises Unavailable where the host has no network namespaces.

    `ram` and `nvme` are bytes of each node; nodes beyond loopback use TLS with one certificate. `server`: an S3 server
    that runs; else there is an own one. `options(cluster, node)` returns what makes a daemon a member, such as `by_file`.
    """

    def __init__(
        self,
        root: Path,
        nodes: int,
        ram: int,
        nvme: int = 0,
        extent_bytes: int = 64 << 10,
        kind: Kind = "loopback",
        options: Callable[[Cluster, Node], Sequence[str]] | None = None,
        server: SeaweedFS | None = None,
        zones: Sequence[str] = (),
        rule: str = "",
    ) -> None:
        """Node i is in zone `zones[i]`, where there are zones. `rule`: the users that may read the data, such as
        uid:0."""
        self.root, self.kind = root, kind
        self._wanted, self._ram, self._nvme, self._extent_bytes = nodes, ram, nvme, extent_bytes
        self._options = options or by_file
        self._server, self._zones, self._rule = server, zones, rule
        self._stack = ExitStack()
        self._network: Network | None = None
        self.nodes: list[Node] = []
        self.members: list[Node] = []
        """The nodes in the file of members."""

    def __enter__(self) -> Cluster:
        self.root.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            if self.kind == "namespaces":
                self._network = stack.enter_context(Network())
            server = self._server or stack.enter_context(SeaweedFS())
            host = self._network.own.address if self._network else "127.0.0.1"
            self.source = stack.enter_context(Source(server, host))
            self._tls = _certificates(self.root) if self._network else []
            self._add(self._wanted, stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    @property
    def own(self) -> Link:
        """The link of the source and of this process. Raises Unavailable on loopback."""
        if self._network is None:
            raise Unavailable(NO_LINKS)
        return self._network.own

    @property
    def members_file(self) -> Path:
        """A file with the address of each member in a line, replaced at each change."""
        return self.root / "members"

    def add(self) -> Node:
        """Start one more node, a member from its start."""
        self._add(1, self._stack)
        return self.nodes[-1]

    def join(self, at: int) -> None:
        """Make a node a member."""
        if self.nodes[at] not in self.members:
            self.members.append(self.nodes[at])
            self.list_members()

    def leave(self, at: int) -> None:
        """Remove a node from the members. Its daemon runs on."""
        if self.nodes[at] in self.members:
            self.members.remove(self.nodes[at])
            self.list_members()

    def list_members(self, listed: Sequence[Node] | None = None) -> None:
        """Write the file of members; `listed` instead of those that are."""
        new = self.members_file.with_suffix(".new")
        new.write_text("".join(f"{node.address}\n" for node in (self.members if listed is None else listed)))
        new.rename(self.members_file)

    def slow(self, at: int, rate: float, delay_s: float = 0.0, loss: float = 0.0) -> None:
        """Limit a node's link to `rate` bytes/s each way. Raises Unavailable, as `Link.shape`."""
        self.nodes[at].link.shape(rate, delay_s, loss)

    def cut(self, at: int, way: Way = "both") -> None:
        """Drop all packets "in" to a node, "out" of it, or "both". Raises Unavailable on loopback."""
        self.nodes[at].link.cut(way)

    def heal(self, at: int) -> None:
        """End the cuts and limits of a node's link."""
        self.nodes[at].link.heal()

    def prefetch(self, nodes: Sequence[Node], records: Records) -> list[pb.PrefetchReply]:
        """Fill nodes with a dataset, all at once."""
        with ThreadPoolExecutor(len(nodes)) as pool:
            return list(pool.map(lambda node: node.prefetch(records), nodes))

    def traffic(self) -> Traffic:
        """A count of the bytes between each two addresses. Raises Unavailable on loopback."""
        if self._network is None:
            raise Unavailable(NO_LINKS)
        return Traffic(self._network)

    def fetching(self) -> list[Node]:
        """The nodes that read an object from the source now."""
        clients = set(self.source.proxy.reading)
        return [node for node in self.nodes if node.has_made(clients)]

    def wait_settled(self) -> None:
        """Wait until the members see each other. Raises TimeoutError."""
        names, deadline = {node.name for node in self.members}, time.monotonic() + WAIT_S
        for node in self.members:
            while (seen := node.sees()) != names:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{node.name} sees {sorted(seen)}:\n{node.log[-2000:]}")
                time.sleep(0.05)

    def _add(self, count: int, stack: ExitStack) -> None:
        """Start nodes side by side."""
        if len(self.nodes) + count > MAX_NODES:
            raise ValueError(f"a cluster has at most {MAX_NODES} nodes")
        made = [self._make(len(self.nodes) + each) for each in range(count)]
        self.nodes += made
        self.members += made
        self.list_members()
        for node in made:
            node.root.mkdir(parents=True, exist_ok=True)
            node.launch()
            stack.push(node)
        for node in made:
            node.wait_ready()

    def _make(self, number: int) -> Node:
        name = f"n{number}"
        link = self._network.add(name) if self._network else None
        address = f"{link.address}:{PORT}" if link else f"127.0.0.1:{two_ports()}"
        node = Node(
            self.root / name, name, address, link, self._options_of, {**os.environ, **self.source.credentials}
        )
        node.zone = self._zones[number] if self._zones else ""
        return node

    def _options_of(self, node: Node) -> list[str]:
        given = ["--ram", str(self._ram), "--extent-bytes", str(self._extent_bytes), "--fillers", "1"]
        if self._nvme:
            folder = node.root / "nvme"
            folder.mkdir(exist_ok=True)
            given += ["--nvme", f"{folder}={self._nvme}"]
        allowed = f"{self.source.prefix}={self._rule}" if self._rule else self.source.prefix
        return [*given, "--allow", allowed, *self._tls, *self._options(self, node)]


def alone(cluster: Cluster, node: Node) -> list[str]:
    """Options of nodes that do not know each other."""
    return []


def by_list(cluster: Cluster, node: Node) -> list[str]:
    """Options of a cluster with a fixed list of members."""
    addresses = ",".join(each.address for each in cluster.members)
    return ["--cluster", f"static:{addresses}", *_named(node)]


def by_file(cluster: Cluster, node: Node) -> list[str]:
    """Options of a cluster that reads its members from a file."""
    return ["--cluster", f"file://{cluster.members_file}", *_named(node)]


def _named(node: Node) -> list[str]:
    zone = ["--zone", node.zone] if node.zone else []
    return ["--node-name", node.name, "--advertise", node.address, *zone]


def _certificates(root: Path) -> list[str]:
    """TLS options with one new certificate for all nodes."""
    ca = trustme.CA()
    issued = ca.issue_cert(TLS_NAME)
    ca.cert_pem.write_to_path(str(root / "ca.pem"))
    issued.private_key_pem.write_to_path(str(root / "node.key"))
    issued.cert_chain_pems[0].write_to_path(str(root / "node.pem"))
    files = {"--tls-cert": "node.pem", "--tls-key": "node.key", "--tls-ca": "ca.pem"}
    given = [word for option, file in files.items() for word in (option, str(root / file))]
    return [*given, "--tls-name", TLS_NAME]
