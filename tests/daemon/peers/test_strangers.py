"""Hosts that reach a node's ports and have no certificate: what they cost the members, and what is said of them."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from pathlib import Path

from cachesvc.daemon.processes.logs import FLOOD_LINES
from testbed import WAIT_S
from testbed.servers import free_ports
from tests.support.membership.nodes import Nodes, authority, certified, fill, meet, metric

STRANGERS = 300


def test_half_open_connections_cost_the_members_no_byte(tmp_path: Path) -> None:
    nodes, metrics = Nodes(tmp_path), f"127.0.0.1:{free_ports(1)[0]}"
    ca = authority(tmp_path)
    with (
        nodes.node("a", *certified(tmp_path, "a", ca), "--metrics", metrics) as other,
        nodes.node("b", *certified(tmp_path, "b", ca)) as node,
        ExitStack() as stack,
    ):
        meet(other, node)
        fill(other, nodes.data)
        host, port = nodes.addresses["a"].split(":")
        for number in range(2 * STRANGERS):
            at = (host, int(port) + number % 2)
            stranger = socket.create_connection(at, WAIT_S, source_address=("127.0.0.2", 0))
            stack.enter_context(stranger)
        _, here = fill(node, nodes.data)
        assert (here.peer_bytes, here.source_bytes) == (nodes.size, 0)
        meet(other, node)
        assert metric(metrics, "cachesvc_peer_refused_connections_total") > 0
        lines = [
            line for line in other.log.splitlines() if "do not finish" in line or "does not finish" in line
        ]
    assert 0 < len(lines) <= FLOOD_LINES
    assert "127.0.0.2" in lines[0]
