"""Verbs of a call or two: list, keep and drop datasets, reload settings, bypass the cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from cachesvc.cli import members, options, output, resolve
from cachesvc.client.control import Control
from cachesvc.core.errors import CacheError, TierFailed
from cachesvc.core.model import DatasetId

if TYPE_CHECKING:
    from cachesvc.v1 import cachesvc_pb2 as pb


HEADS = ["id", "uri~", "resident>?", "size>?", "", "samples>?", "format?"]


@click.command("ls")
@members.option
@options.wide
@options.daemon
def list_datasets(cluster: bool, wide: bool, socket: str | None, json: bool) -> int:
    """List the datasets that the daemon knows, by URI."""
    code, found = members.ask(socket, cluster, Control.list, json)
    listed = [(row, node) for node, datasets in found.items() for row in datasets]
    if json:
        for row, node in listed:
            with output.of_node(node):
                output.emit(output.plain(row))
        return code
    listed.sort(key=lambda each: (each[0].dataset.uri, each[0].dataset.id, each[1]))
    rows = [_cells(row, wide) + ([node] if cluster else []) for row, node in listed]
    output.table([*HEADS, "node~"] if cluster else HEADS, rows, wide)
    return code


def _cells(row: pb.DatasetStatus, wide: bool) -> list[str]:
    return [
        output.short_id(row.dataset.id, wide),
        row.dataset.uri,
        output.share(row.resident_bytes, row.dataset.size_bytes),
        output.size(row.dataset.size_bytes),
        output.marks(row),
        f"{row.dataset.samples:,}",
        row.dataset.format,
    ]


@click.command()
@click.argument("name", metavar="URI|ID", shell_complete=options.known_uris)
@members.option
@options.dataset
@options.daemon
def pin(name: str, cluster: bool, socket: str | None, json: bool, **given: Any) -> int:
    """Keep a dataset's resident extents when other data needs room."""
    wanted = options.dataset_options(given)

    def pin(control: Control) -> None:
        dataset = resolve.current_version(control, name, wanted, json)
        control.pin(dataset, True)
        beyond_bytes = sum(reply.unfit_bytes for reply in control.prefetch(dataset, dry_run=True))
        if beyond_bytes:
            output.print_notes(
                [f"{output.size(beyond_bytes)} of it have no room, and are not kept until there is room"],
                json,
            )
        row = {"event": "pinned", "dataset": dataset, "target": name}
        output.report(json, f"{name} ({dataset}) is pinned", row)

    return members.ask(socket, cluster, pin, json)[0]


@click.command()
@click.argument("name", metavar="URI|ID", shell_complete=options.known_uris)
@members.option
@options.dataset
@options.daemon
def unpin(name: str, cluster: bool, socket: str | None, json: bool, **given: Any) -> int:
    """Let a dataset be evicted again; every known version of a URI."""

    def unpin(control: Control, versions: Sequence[DatasetId]) -> None:
        pinned = {row.dataset.id for row in control.list() if row.pinned}
        for dataset in versions:
            control.pin(dataset, False)
            row = {"event": "unpinned", "dataset": dataset, "target": name, "was_pinned": dataset in pinned}
            done = "was pinned, and may be evicted now" if dataset in pinned else "was not pinned"
            output.report(json, f"{name} ({dataset}) {done}", row)

    return members.run_versions(socket, cluster, name, options.dataset_options(given), unpin, json)[0]


@click.command()
@click.argument("name", metavar="URI|ID", shell_complete=options.known_uris)
@members.option
@options.dataset
@options.daemon
def evict(name: str, cluster: bool, socket: str | None, json: bool, **given: Any) -> int:
    """Drop a dataset from every tier; every known version of a URI.

    Extents that readers lease or that are pinned stay; they are reported, and the exit code is 1. Extents in a lost tier
    stay too, with exit code 9. The source is never touched. With --cluster, a member that does not answer drops the dataset
    when it is back, within 7 days.
    """

    def evict(control: Control, versions: Sequence[DatasetId]) -> None:
        _evict(control, versions, name, json)

    wanted = options.dataset_options(given)
    code, versions, absent = members.run_versions(socket, cluster, name, wanted, evict, json)
    if absent:
        with Control(socket) as control:
            control.evict_later(absent, versions)
        text = f"{', '.join(absent)} drop{'s' if len(absent) == 1 else ''} {name} when back"
        output.report(json, text, {"event": "kept", "nodes": absent, "datasets": versions, "target": name})
    return code


def _evict(control: Control, versions: Sequence[DatasetId], name: str, json: bool) -> None:
    stayed_bytes = lost_bytes = 0
    for dataset in versions:
        reply = control.evict(dataset)
        kept = f"; {output.size(reply.busy_bytes)} are leased or pinned and stay" if reply.busy_bytes else ""
        if reply.lost_bytes:
            kept += f"; {output.size(reply.lost_bytes)} are in a lost tier and stay"
        text = f"{name} ({dataset}): {output.size(reply.evicted_bytes)} evicted{kept}"
        output.report(
            json, text, {"event": "evicted", "dataset": dataset, "target": name} | output.plain(reply)
        )
        stayed_bytes += reply.busy_bytes
        lost_bytes += reply.lost_bytes
    if stayed_bytes:
        raise CacheError(
            f"{output.size(stayed_bytes)} of {name} stay; unpin it, or wait until its readers are gone, and evict it again"
        )
    if lost_bytes:
        raise TierFailed(
            f"{output.size(lost_bytes)} of {name} are in a lost tier and come back with it; evict it again then"
            " (cachesvc status says which tier, the daemon's log why)"
        )


@click.command()
@click.argument("switch", type=click.Choice(("on", "off")))
@options.daemon
def bypass(switch: str, socket: str | None, json: bool) -> int:
    """Have this node's readers read from the source directly.

    The switch outlives restarts of the daemon. Readers share the rate CACHESVC_DIRECT_RATE. Those that must not read
    directly (CACHESVC=require) wait, and end with an error that says why. For the daemon's own user and root.
    """
    with Control(socket) as control:
        control.bypass(switch == "on")
    text = "readers read from the source directly" if switch == "on" else "readers read through the cache"
    output.report(json, text, {"event": "bypass", "on": switch == "on"})
    return 0


@click.command()
@options.daemon
def reload(socket: str | None, json: bool) -> int:
    """Have the daemon read its configuration files again.

    It takes allowed prefixes, sources, quotas, budgets of tiers and the level of the log; other settings wait for the next
    start.
    Wrong settings change nothing, and end with the code that `serve` would end with.
    """
    with Control(socket) as control:
        reply = control.reload()
    text = f"changed: {', '.join(reply.taken)}" if reply.taken else "nothing changed"
    if reply.waiting:
        text += f"; needs a restart: {', '.join(reply.waiting)}"
    output.report(json, text, output.plain(reply))
    return 0
