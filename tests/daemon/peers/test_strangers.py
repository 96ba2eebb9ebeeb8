"""Hosts that reach a node's ports and have no certificate: what they cost the members, and what is said of them."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest

from cachesvc.client.control import Control
from cachesvc.config import Tls
from cachesvc.daemon.peers.agent import serve_calls
from cachesvc.daemon.peers.owned_extents import OwnedExtents
from cachesvc.daemon.peers.peer_calls import PeerCalls
from cachesvc.daemon.peers.servicer import PeersServicer
from cachesvc.daemon.processes.logs import FLOOD_LINES
from cachesvc.v1 import cachesvc_pb2 as pb
from testbed import WAIT_S
from testbed.servers import free_ports
from tests.support.membership.nodes import Nodes, authority, certified, fill, meet, metric
from tests.support.waiting import wait_until

STRANGERS = 300


def test_the_port_of_calls_bounds_its_connections(tmp_path: Path) -> None:
    ca, (port,) = authority(tmp_path), free_ports(1)
    certified(tmp_path, "a", ca)
    tls = Tls(*(str(tmp_path / name) for name in ("a.pem", "a.key", "ca.pem")))
    owned = OwnedExtents("a", lambda extents, later, without_source=False: set())
    servicer = PeersServicer(
        owned,
        pb.HelloReply,
        lambda *_: None,
        lambda _: None,
        lambda *_: None,
        bool,
        lambda _: b"",
        lambda *_: iter(()),
        lambda *_: (b"", False),
    )
    address = f"127.0.0.1:{port}"
    server = serve_calls(servicer, address, tls, connections=1)
    first, second = PeerCalls(tls, ""), PeerCalls(tls, "")
    assert first.hello(address, pb.HelloRequest()) == pb.HelloReply()
    with pytest.raises(grpc.RpcError):
        second.hello(address, pb.HelloRequest())
    assert first.hello(address, pb.HelloRequest()) == pb.HelloReply()
    server.stop(None).wait(WAIT_S)


@pytest.mark.slow
def test_half_open_connections_cost_the_members_no_byte(tmp_path: Path) -> None:
    nodes, metrics = Nodes(tmp_path), f"127.0.0.1:{free_ports(1)[0]}"
    ca = authority(tmp_path)
    with (
        nodes.node("a", *certified(tmp_path, "a", ca), "--metrics", metrics) as other,
        nodes.node("b", *certified(tmp_path, "b", ca)) as node,
    ):
        meet(other, node)
        fill(other, nodes.data)
        host, port = nodes.addresses["a"].split(":")
        gave = [0]

        def served_beside_strangers() -> bool:
            """Fill beside new strangers, since half-open connections end after a while; return whether all bytes then came
            from the member. On a busy machine a few may take 3 s, and come from the source instead."""
            with ExitStack() as stack:
                for number in range(2 * STRANGERS):
                    at = (host, int(port) + number % 2)
                    stranger = socket.create_connection(at, WAIT_S, source_address=("127.0.0.2", 0))
                    stack.enter_context(stranger)
                dataset, here = fill(node, nodes.data)
            gave.append(here.peer_bytes)
            with Control(node.socket_dir) as control:
                control.evict(dataset)
            return gave[-1] - gave[-2] == nodes.size

        wait_until(served_beside_strangers)
        meet(other, node)
        assert metric(metrics, "cachesvc_peer_refused_connections_total") > 0
        lines = [
            line for line in other.log.splitlines() if "do not finish" in line or "does not finish" in line
        ]
    assert 0 < len(lines) <= FLOOD_LINES * len(gave)
    assert "127.0.0.2" in lines[0]
