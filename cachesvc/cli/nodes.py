"""`cachesvc nodes`: the members of the cluster, as this node sees them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import click

from cachesvc.cli import options, output
from cachesvc.client.control import Control
from cachesvc.core.errors import InvalidInput

if TYPE_CHECKING:
    from cachesvc.v1 import cachesvc_pb2 as pb

WRAPPED = re.compile(
    r"failed to connect to all addresses; last error: \w+: \S+ (Failed to connect to remote host: )?(connect: )?"
)


@click.command()
@options.wide
@options.daemon
def nodes(wide: bool, socket: str | None, json: bool) -> int:
    """Show the members of the cluster.

    Exits 1 when one of them is not present: away, refused, listed and never heard of, or its extents cannot be read.
    """
    with Control(socket) as control:
        reply = control.nodes()
    if not reply.clustered:
        raise InvalidInput("this daemon is alone; start it with --cluster to share extents with other nodes")
    if json:
        for node in reply.nodes:
            output.emit(output.plain(node))
    else:
        heads = [
            "node~",
            "state",
            "why~",
            "address~?",
            "zone?",
            "capacity>?",
            "extents>?",
            "calls>?",
            "blocks>?",
            "rate>?",
            "release?",
        ]
        output.table(heads, [_row(node) for node in reply.nodes], wide)
    return int(any(node.state != "present" for node in reply.nodes))


def _row(node: pb.NodeStatus) -> list[str]:
    away = f"{node.state} for {output.duration(node.away_s)}" if node.state == "away" else node.state
    return [
        f"{node.name} (this node)" if node.me else node.name,
        away,
        shortened(node.why),
        node.address,
        node.zone,
        output.size(node.weight_bytes),
        f"{node.extents:,}",
        _milliseconds(node.round_trip_us),
        _milliseconds(node.block_round_trip_us),
        f"{output.size(node.bytes_per_s)}/s" if node.bytes_per_s else "",
        node.release,
    ]


def _milliseconds(time_us: int) -> str:
    return f"{time_us / 1000:,.1f} ms" if time_us else ""


def shortened(why: str) -> str:
    """A reason without what gRPC puts around it: the address, which has a column, and that it could not connect."""
    return WRAPPED.sub("", why)
