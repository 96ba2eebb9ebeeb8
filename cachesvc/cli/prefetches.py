"""`cachesvc prefetches`, `cancel`: list prefetches, and end one."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from cachesvc.cli import members, options, output
from cachesvc.client.control import Control
from cachesvc.core.errors import NotFound

if TYPE_CHECKING:
    from cachesvc.v1 import cachesvc_pb2 as pb

HEADS = ["id", "uri~", "state", "done>", "size>?", "age>?", "uid>?", "why~?"]


@click.command()
@members.option
@options.wide
@options.daemon
def prefetches(cluster: bool, wide: bool, socket: str | None, json: bool) -> int:
    """List prefetches, under way and ended lately.

    Those that `prefetch --detach` began go on across restarts of the daemon. You see your own; the daemon's own user sees
    all.
    """
    code, found = members.ask(socket, cluster, Control.prefetches, json)
    listed = [(each, node) for node, rows in found.items() for each in rows]
    if json:
        for each, node in listed:
            with output.of_node(node):
                output.emit(output.plain(each))
        return code
    rows = [_cells(each) + ([node] if cluster else []) for each, node in listed]
    output.table([*HEADS, "node~"] if cluster else HEADS, rows, wide)
    return code


@click.command()
@click.argument("prefetch", metavar="ID")
@members.option
@options.daemon
def cancel(prefetch: str, cluster: bool, socket: str | None, json: bool) -> int:
    """End a prefetch. What is resident stays."""
    unknown: list[NotFound] = []

    def cancel(control: Control) -> bool:
        try:
            control.cancel_prefetch(prefetch)
        except NotFound as error:
            unknown.append(error)
            return False
        output.report(json, f"prefetch {prefetch} is ended", {"event": "cancelled", "prefetch": prefetch})
        return True

    code, found = members.ask(socket, cluster, cancel, json)
    if unknown and not any(found.values()):
        raise unknown[0]
    return code


def _cells(each: pb.PrefetchStatus) -> list[str]:
    done_bytes = each.progress.resident_bytes + each.progress.cluster_bytes
    return [
        each.id,
        each.uri,
        each.state,
        output.share(done_bytes, each.progress.size_bytes),
        output.size(each.progress.size_bytes),
        output.duration(time.time() - each.started),
        f"{each.uid}" if each.uid >= 0 else "",
        each.why,
    ]
