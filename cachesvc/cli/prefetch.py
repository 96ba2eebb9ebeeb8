"""`cachesvc prefetch`: fill the cache before the job starts, and report whether every extent is resident."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import click

from cachesvc.cli import members, options, output, resolve
from cachesvc.cli.prefetch_part import RANKS, FreshRun, ahead, fill_parts, part_of, saved
from cachesvc.cli.progress_bar import ProgressBar
from cachesvc.cli.verify import check
from cachesvc.client.control import Control
from cachesvc.core.errors import CacheError, DaemonUnavailable, InvalidInput, OutOfSpace, from_code
from cachesvc.core.model import DatasetId

if TYPE_CHECKING:
    from cachesvc.v1 import cachesvc_pb2 as pb


@click.command()
@click.argument("uris", nargs=-1, metavar="[URI|ID]...", shell_complete=options.known_uris)
@options.dataset
@click.option("--together", is_flag=True, help="All URIs are one dataset, as in open_dataset([...]).")
@click.option("--refresh", is_flag=True, help="List the source anew instead of trusting a recent listing.")
@click.option("--dry-run", is_flag=True, help="Only print what would be fetched and whether it fits.")
@click.option("--verify", "verify_too", is_flag=True, help="Verify the resident extents again afterwards.")
@options.saved_state
@click.option(
    "--steps",
    type=click.IntRange(1),
    help="Fetch what the next steps read: of a --state, or of a run that begins.",
)
@click.option(
    "--world", type=click.IntRange(1), default=1, show_default=True, help="Number of ranks (--steps)."
)
@click.option(
    "--rank-range", type=RANKS, help="The ranks of this node, such as 8-15 (--steps).  [default: all]"
)
@click.option(
    "--global-batch", type=click.IntRange(1), help="Samples of one step of a run that begins (--steps)."
)
@click.option("--seed", type=click.IntRange(0), default=0, help="Its seed (--steps).")
@click.option("--nodes", type=click.IntRange(1), default=1, help="Its nodes (--steps).")
@click.option("--no-shuffle", is_flag=True, help="It does not shuffle (--steps).")
@click.option(
    "--where", metavar="EXPR", help="Fetch what holds the samples that match, as `cachesvc find` prints them."
)
@click.option(
    "--fraction", type=options.Number(0, 1), help="Fetch this part of the data, from its beginning."
)
@click.option("--detach", is_flag=True, help="Do not wait: `cachesvc prefetches` shows how far it is.")
@members.option
@options.daemon
def prefetch(
    uris: tuple[str, ...],
    together: bool,
    refresh: bool,
    dry_run: bool,
    verify_too: bool,
    state: str | None,
    name: str,
    catalogs: tuple[str, ...],
    counts: str | None,
    ids: str | None,
    steps: int | None,
    world: int,
    rank_range: range | None,
    global_batch: int | None,
    seed: int,
    nodes: int,
    no_shuffle: bool,
    where: str | None,
    fraction: float | None,
    detach: bool,
    cluster: bool,
    socket: str | None,
    json: bool,
    **given: Any,
) -> int:
    """Fill the cache with datasets.

    Each URI is a prefix, file, glob or brace range. Exits 0 only when every extent is resident; each is verified when it
    is filled. Run it again to continue after an interruption. A dry run also exits 8 when the data does not fit.

    With --state, only what these ranks of a run read next: `prefetch --state ckpt/loader.json --steps 200 --world 64
    --rank-range 8-15`.
    """
    wanted = options.dataset_options(given)
    if state is not None or steps is not None or where is not None or fraction is not None:
        if dry_run or verify_too or refresh:
            raise InvalidInput("--dry-run, --verify and --refresh are of whole datasets")
        if cluster or detach:
            raise InvalidInput("--cluster and --detach fetch whole datasets")
        if state is not None:
            parts = ahead(saved(state, name, catalogs, counts, ids, uris, socket), steps, world, rank_range)
        else:
            fresh = FreshRun(steps, global_batch, seed, nodes, not no_shuffle, world, rank_range)
            parts = [part_of(uris, wanted, where, fraction, fresh, socket, json)]
        return fill_parts(parts, socket, json)
    if detach and (dry_run or verify_too):
        raise InvalidInput("--dry-run and --verify wait for the answer; leave out --detach")
    if not uris:
        raise click.UsageError("give a URI, or the --state of a run")
    groups = [list(uris)] if together else [[uri] for uri in uris]
    detached = {_named(group): secrets.token_hex(4) for group in groups}
    with ProgressBar("prefetch", json) if cluster else nullcontext() as bar:
        update = _summed(bar.update) if bar else None

        def fill_groups(control: Control) -> None:
            failure: CacheError | None = None
            for group in groups:
                name = _named(group)
                try:
                    if options.is_dataset_id(group[0]) and len(group) == 1:
                        dataset = resolve.by_id(control, group[0])
                    else:
                        dataset = resolve.open_uris(control, group, wanted, json, refresh).id
                    if detach:
                        _detach(control, dataset, name, detached[name], json)
                        continue
                    fill(control, dataset, name, dry_run, json, update)
                    if verify_too and not dry_run:
                        check(control, dataset, name, json)
                except DaemonUnavailable:
                    raise
                except CacheError as error:
                    # The other datasets are filled nevertheless; the first failure gives the exit code.
                    if failure is not None:
                        output.complain(error, json)
                    failure = failure or error
            if failure is not None:
                raise failure

        return members.ask(socket, cluster, fill_groups, json)[0]


def _named(group: Sequence[str]) -> str:
    return group[0] if len(group) == 1 else f"{group[0]} and {len(group) - 1} more"


def _detach(control: Control, dataset: DatasetId, name: str, wanted: str, as_json: bool) -> None:
    started = control.start_prefetch(dataset, wanted)
    row = {"event": "started", "dataset": dataset, "target": name, "prefetch": started}
    output.report(as_json, f"{name} ({dataset}): prefetch {started} is under way", row)


def _summed(update: Callable[[int, int], None]) -> Callable[[int, int], None]:
    """Return a function that reports the sums of what all threads gave it last."""
    lock, latest = threading.Lock(), dict[int, tuple[int, int]]()

    def sum_up(done: int, total: int) -> None:
        with lock:
            latest[threading.get_ident()] = (done, total)
            update(*map(sum, zip(*latest.values())))

    return sum_up


def fill(
    control: Control,
    dataset: DatasetId,
    name: str,
    dry_run: bool,
    as_json: bool,
    update: Callable[[int, int], None] | None = None,
) -> None:
    """Fill a dataset, or with `dry_run` say what that would do; raise the error that keeps it from being resident.
    `update` gets the bytes done and of the dataset; without it there is a bar."""
    started = time.monotonic()
    reply: pb.PrefetchReply | None = None
    before_bytes = 0
    with ProgressBar("prefetch", as_json) as progress:
        for reply in control.prefetch(dataset, dry_run):
            before_bytes = before_bytes or reply.source_bytes
            (update or progress.update)(reply.resident_bytes + reply.cluster_bytes, reply.size_bytes)
    if reply is None:
        raise CacheError("the daemon ended the prefetch without an answer; see its log")
    took_s = time.monotonic() - started
    if as_json:
        event = "fit" if dry_run else "prefetched"
        output.emit(
            {"event": event, "dataset": dataset, "target": name, "took_s": round(took_s, 3)} | _counts(reply)
        )
    elif dry_run:
        output.say(_plan(name, dataset, reply))
    else:
        output.say(_result(name, dataset, reply, took_s))
    _judge(name, reply, dry_run)


def _judge(name: str, reply: pb.PrefetchReply, dry_run: bool) -> None:
    """Raise the error that keeps the dataset from being resident."""
    if reply.failures:
        first, missing = reply.failures[0], reply.extents - reply.resident_extents
        many = ""
        if missing > 1:
            many = f"{missing:,} extents of {name} are missing, and the first failed: "
        elif not missing:
            many = f"{len(reply.failures):,} extents of {name} are resident except some objects: "
        raise from_code(first.code, many + first.message)
    if reply.unfit_bytes:
        raise OutOfSpace(
            f"{name} does not fit: {reply.unfit_bytes:,} bytes ({output.size(reply.unfit_bytes)}) of"
            f" {reply.size_bytes:,} have no room; {_advice(reply)}"
        )
    if not dry_run and (not reply.done or reply.resident_extents + reply.cluster_extents < reply.extents):
        raise CacheError(
            f"only {reply.resident_extents:,} of {reply.extents:,} extents of {name} are resident;"
            " run prefetch again"
        )


def _advice(reply: pb.PrefetchReply) -> str:
    """Say what to change where data does not fit: the tiers, the quota, or both."""
    advice = []
    if reply.over_quota_bytes:
        advice.append(
            f"{output.size(reply.over_quota_bytes)} are beyond the quota of its data or user: raise --quota"
        )
    if reply.over_quota_bytes < reply.unfit_bytes:
        if reply.lost_tiers:
            advice.append(
                f"the room of {', '.join(reply.lost_tiers)} is lost: repair what the daemon's log says"
            )
        if reply.full_tiers:
            advice.append(f"{', '.join(reply.full_tiers)} takes no more: free what the daemon's log says")
        advice.append("give the daemon more --ram or --nvme, or evict other data")
    return ", and ".join(advice)


def _counts(reply: pb.PrefetchReply) -> dict[str, Any]:
    counts = output.plain(reply)
    del counts["done"]
    resident = reply.resident_extents + reply.cluster_extents == reply.extents
    return counts | {"fits": not reply.unfit_bytes, "resident": resident}


def _plan(name: str, dataset: DatasetId, reply: pb.PrefetchReply) -> str:
    missing = reply.size_bytes - reply.resident_bytes
    fit = f"{output.size(reply.unfit_bytes)} do not fit" if reply.unfit_bytes else "fits"
    return (
        f"{name} ({dataset}): {reply.extents:,} extents, {output.size(reply.size_bytes)};"
        f" {reply.resident_extents:,} resident, {output.size(missing)} to fetch; {fit}"
    )


def _result(name: str, dataset: DatasetId, reply: pb.PrefetchReply, took_s: float) -> str:
    return (
        f"{name} ({dataset}): {reply.resident_extents:,} of {reply.extents:,} extents resident,"
        f" {output.size(reply.resident_bytes)} of {output.size(reply.size_bytes)},"
        f" in {output.duration(took_s)}"
        + (f", {output.size(reply.peer_bytes)} from peers" if reply.peer_bytes else "")
        + (f", and {output.size(reply.cluster_bytes)} on their owners" if reply.cluster_extents else "")
    )
