"""`cachesvc nodes`: the members of the cluster, as this node sees them; removes one that will not return."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from cachesvc.cli import options, output
from cachesvc.client.control import Control
from cachesvc.core.errors import InvalidInput

if TYPE_CHECKING:
    from cachesvc.v1 import cachesvc_pb2 as pb

WRONG = ("slow", "unreadable", "wrong", "away", "refused", "unknown")
"""States that need somebody's attention. A node that said goodbye does not."""
HEADS = [
    "node~",
    "state",
    "why~",
    "address~?",
    "zone?",
    "capacity>?",
    "free>?",
    "extents>?",
    "calls>?",
    "blocks>?",
    "rate>?",
    "source?",
    "release?",
]


@click.command()
@click.option(
    "--remove",
    metavar="NAME",
    help="Have all nodes forget a node that is away and will not return: its extents belong to the others at once.",
)
@options.wide
@options.daemon
def nodes(remove: str | None, wide: bool, socket: str | None, json: bool) -> int:
    """Show the members of the cluster, and warnings.

    Exits 1 when one of them is away, refused, listed and never heard of, or its extents cannot be read; and while no list
    of members has been read. Nodes that said goodbye and warnings do not count.
    """
    with Control(socket) as control:
        if remove is not None:
            return _removed(remove, control.remove_node(remove), json)
        reply = control.nodes()
    if not reply.clustered:
        raise InvalidInput("this daemon is alone; start it with --cluster to share extents with other nodes")
    if json:
        for node in reply.nodes:
            output.emit(output.plain(node))
        for warning in reply.warnings:
            output.emit({"warning": warning.text, "kind": warning.kind})
    else:
        output.table(HEADS, [cells_of(node) for node in reply.nodes], wide)
        say_warnings(reply)
    return int(not reply.list_read or any(node.state in WRONG for node in reply.nodes))


def say_warnings(cluster: pb.NodesReply | pb.ClusterStatus) -> None:
    """Print the warnings about the cluster, a line each."""
    for warning in cluster.warnings:
        output.say(f"warning: {warning.text}")
    if not cluster.list_read:
        output.say("warning: this node has not read a list of members yet, so it works alone")


def _removed(name: str, reply: pb.RemoveNodeReply, json: bool) -> int:
    untold = list(reply.untold)
    text = f"{name} is removed"
    if reply.listed:
        text += "; it is still in the list of members, and joins again when it answers"
    if untold:
        text += f"; {', '.join(untold)} could not be told: repeat this there"
    output.report(json, text, {"removed": name, "listed": reply.listed, "untold": untold})
    return int(bool(untold))


def cells_of(node: pb.NodeStatus) -> list[str]:
    """Return the row of a node, below `HEADS`."""
    gone = node.state in ("away", "left")
    return [
        f"{node.name} (this node)" if node.me else node.name or node.address,
        f"{node.state} for {output.duration(node.away_s)}" if gone else node.state,
        node.why,
        node.address,
        node.zone,
        output.size(node.weight_bytes),
        output.size(node.free_bytes) if node.state == "present" else "",
        f"{node.extents:,}",
        _milliseconds(node.round_trip_us),
        _milliseconds(node.block_round_trip_us),
        f"{output.size(node.bytes_per_s)}/s" if node.bytes_per_s else "",
        node.source if node.state == "present" else "",
        node.release,
    ]


def _milliseconds(time_us: int) -> str:
    return f"{time_us / 1000:,.1f} ms" if time_us else ""
