"""`cachesvc status`: show tiers, datasets and counters of this node."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import click

from cachesvc.cli import members, options, output
from cachesvc.cli.nodes import say_warnings
from cachesvc.client.control import Control
from cachesvc.core.model import RAM

if TYPE_CHECKING:
    from cachesvc.v1 import cachesvc_pb2 as pb

EPOCHS = 3
"""Epochs of a dataset in the table, including the current one; `--json` prints all that are kept."""


HEADS = [
    "dataset~",
    "resident>",
    "share>",
    "readers>",
    "hits>",
    "bound>",
    "source>?",
    "size>?",
    "ahead>?",
    "peers>?",
    "",
    "id?",
]


NODE_HEADS = [
    "node~",
    "up>?",
    "readers>",
    "fills>?",
    "ram>",
    "nvme>",
    "datasets>",
    "source>?",
    "peers>?",
    "release?",
    "",
]


@click.command()
@members.option
@options.wide
@options.daemon
def status(cluster: bool, wide: bool, socket: str | None, json: bool) -> int:
    """Show the daemon's tiers, datasets and counters."""
    if cluster:
        return _of_members(socket, wide, json)
    with Control(socket) as control:
        reply = control.status()
    if json:
        output.emit(output.plain(reply))
        return 0
    output.say(
        f"cachesvc {reply.version}, pid {reply.pid}, up {output.duration(reply.uptime_s)},"
        f" {output.plural(reply.readers, 'reader')}, {output.plural(reply.fills_running, 'fill')} running,"
        f" serves {' '.join(reply.allow) or 'all that its user may read'}"
    )
    if reply.bypassed:
        output.say(
            "bypassed: readers of this node read from the source directly, until `cachesvc bypass off`"
        )
    if (asked := reply.sources).requests:
        output.say(
            f"sources: {output.plural(asked.requests, 'read')}, {output.size(asked.bytes)},"
            f" {output.plural(asked.retries, 'retry', 'retries')}, throttled {output.plural(asked.throttled, 'time')},"
            f" {asked.hedges:,} hedged ({output.size(asked.hedge_bytes)})"
        )
    if reply.HasField("cluster"):
        output.say(
            f"cluster: {output.plural(reply.cluster.present, 'node')} present, {reply.cluster.away:,} away,"
            f" {output.size(reply.cluster.received_bytes)} received from peers,"
            f" {output.size(reply.cluster.sent_bytes)} sent"
        )
        say_warnings(reply.cluster)
    heads = ["tier", "used>", "budget>", "full>", "held>", "scrubbed>?", "corrupt>?", ""]
    output.table(heads, [_tier(t) for t in reply.tiers], wide)
    if reply.datasets:
        output.table(HEADS, [_dataset(d, wide) for d in _by_use(reply.datasets)], wide)
    if epochs := [
        [d.dataset.uri, *output.epoch_cells(epoch)] for d in reply.datasets for epoch in d.epochs[-EPOCHS:]
    ]:
        output.table(["dataset~", *output.EPOCH_HEADS], epochs, wide)
    return 0


def _of_members(socket: str | None, wide: bool, json: bool) -> int:
    code, found = members.ask(socket, True, Control.status, json)
    if json:
        for node, reply in found.items():
            with output.of_node(node):
                output.emit(output.plain(reply))
    else:
        output.table(NODE_HEADS, [_node(*each) for each in found.items()], wide)
    return code


def _node(name: str, reply: pb.StatusReply) -> list[str]:
    nvme = [tier for tier in reply.tiers if tier.name != RAM]
    troubles = [f"{tier.name} {trouble}" for tier in reply.tiers if (trouble := output.tier_trouble(tier))]
    return [
        name,
        output.duration(reply.uptime_s),
        f"{reply.readers:,}",
        f"{reply.fills_running:,}",
        _used([tier for tier in reply.tiers if tier.name == RAM]),
        _used(nvme),
        f"{len(reply.datasets):,}",
        output.size(reply.sources.bytes),
        output.size(reply.cluster.received_bytes),
        reply.version,
        "; ".join([*(["bypassed"] if reply.bypassed else []), *troubles]),
    ]


def _used(tiers: Sequence[pb.TierStatus]) -> str:
    budget_bytes = sum(tier.budget_bytes for tier in tiers)
    if not budget_bytes:
        return "-"
    return (
        f"{output.share(sum(tier.used_bytes for tier in tiers), budget_bytes)} of {output.size(budget_bytes)}"
    )


def _by_use(rows: Iterable[pb.DatasetStatus]) -> list[pb.DatasetStatus]:
    return sorted(rows, key=lambda row: (-row.readers, -row.resident_bytes, row.dataset.uri))


def _tier(tier: pb.TierStatus) -> list[str]:
    return [
        tier.name,
        output.size(tier.used_bytes),
        output.size(tier.budget_bytes),
        output.share(tier.used_bytes, tier.budget_bytes),
        output.size(tier.held_bytes),
        output.size(tier.scrubbed_bytes),
        f"{tier.corrupt_extents:,}",
        output.tier_trouble(tier)
        or (f"{output.size(tier.unplanned_bytes)} without a plan" if tier.unplanned_bytes else ""),
    ]


def _dataset(row: pb.DatasetStatus, wide: bool) -> list[str]:
    demands = row.hits + row.ahead + row.misses + row.refused
    return [
        row.dataset.uri,
        output.size(row.resident_bytes),
        output.share(row.resident_bytes, row.dataset.size_bytes),
        f"{row.readers:,}",
        output.share(row.hits, demands),
        output.share(row.bound, 1.0 if row.bound else 0.0),
        output.size(row.source_bytes),
        output.size(row.dataset.size_bytes),
        output.share(row.ahead, demands),
        output.size(row.peer_bytes),
        output.marks(row),
        output.short_id(row.dataset.id, wide),
    ]
