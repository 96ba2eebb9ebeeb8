"""`cachesvc drain`: have a node hand on what it alone holds, and leave the cluster for good."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from cachesvc.cli import options, output
from cachesvc.cli.progress_bar import ProgressBar
from cachesvc.client.control import Control
from cachesvc.core.errors import CacheError, DeadlineExceeded, OutOfSpace

if TYPE_CHECKING:
    from cachesvc.v1 import cachesvc_pb2 as pb


@click.command()
@click.argument("node", required=False, default="")
@click.option(
    "--timeout",
    type=options.DURATION,
    default="10m",
    show_default=True,
    metavar="TIME",
    help="Leave after this time, with what was not handed on until then.",
)
@options.daemon
def drain(node: str, timeout: float, socket: str | None, json: bool) -> int:
    """Have a node hand on what it alone holds, and end its daemon.

    NODE is a name in `cachesvc nodes`; without it, this node. The next owners fetch the extents from there, into room where
    nothing is kept, and no node reads the source again. Exits 8 where others have no room, 11 at the timeout; the node
    leaves nevertheless. Ctrl-C leaves it a member.
    """
    reply: pb.DrainReply | None = None
    with Control(socket, node) as control, ProgressBar("drain", json) as progress:
        for reply in control.drain(timeout):
            progress.update(reply.moved_bytes, reply.size_bytes)
    if reply is None or not reply.done:
        raise CacheError("the daemon ended the drain early; see its log")
    name = node or "this node"
    text = (
        f"{name} has left: {reply.moved_extents:,} of {output.plural(reply.extents, 'extent')} that it alone held,"
        f" {output.size(reply.moved_bytes)} of {output.size(reply.size_bytes)}, are on other nodes"
    )
    output.report(json, text, {"event": "drained"} | output.plain(reply))
    _judge(reply, json)
    return 0


def _judge(reply: pb.DrainReply, as_json: bool) -> None:
    """Raise the error that kept some extents from being handed on. Print notes of those that no other node could use."""
    others = [
        (reply.unknown_bytes, "of datasets that no other node has opened"),
        (reply.own_bytes, "prepared samples, or of no dataset"),
    ]
    output.print_notes(
        [f"{output.size(count)} were not handed on: {what}" for count, what in others if count], as_json
    )
    late_bytes = reply.size_bytes - reply.moved_bytes - sum(count for count, _ in others) - reply.unfit_bytes
    if reply.unfit_bytes:
        raise OutOfSpace(f"the other nodes have no room for {output.size(reply.unfit_bytes)}")
    if late_bytes > 0:
        raise DeadlineExceeded(f"{output.size(late_bytes)} were not handed on in time")
