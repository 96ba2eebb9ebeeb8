"""Reports how much a prefetch has filled, and how much of its dataset will not fit."""

from __future__ import annotations

from cachesvc.core.model import DatasetId
from cachesvc.daemon.datasets import ServedDataset
from cachesvc.daemon.runner import Runner
from cachesvc.v1 import cachesvc_pb2 as pb

MAX_FAILURES = 100
"""The most failures that one progress message names."""


def progress_of(runner: Runner, job: int, dataset: ServedDataset, planned: bool) -> pb.PrefetchReply:
    """Return the progress of a job's prefetch. `planned`: nothing is filled, and the reply tells what is resident and what
    would not fit, in all of the cluster where there is one. Runs on the loop's thread."""
    progress = runner.node.progress(job)
    failures = [
        pb.ExtentFailure(extent=extent.hex(), message=message, code=code)
        for extent, (code, message) in [*progress.failed.items(), *progress.incomplete.items()][:MAX_FAILURES]
    ]
    reply = pb.PrefetchReply(
        extents=len(dataset.extent_ids),
        resident_extents=progress.resident_extents,
        size_bytes=dataset.size_bytes,
        resident_bytes=progress.resident_bytes,
        source_bytes=runner.fills.counts.source_bytes(dataset.id),
        peer_bytes=runner.fills.counts.peer_bytes(dataset.id),
        unfit_bytes=progress.stuck_bytes,
        failures=failures,
        done=planned or progress.finished,
    )
    if reply.done:
        _add_unfit(runner, reply, dataset.id, planned)
    return reply


def _add_unfit(runner: Runner, reply: pb.PrefetchReply, dataset: DatasetId, planned: bool) -> None:
    """Add the lost and full tiers where bytes will not fit, and how many of the bytes exceed quotas alone. For a planned
    prefetch, first estimate those bytes from the quotas and the room without kept extents. An extent lies in one tier, so
    up to an extent more for each tier may not fit."""
    node = runner.node
    shares = node.policy.shares
    tiers = [tier for tier in node.status().tiers if not tier.lost]
    room = sum(max(0, tier.budget_bytes - tier.reserve_bytes - tier.kept_bytes) for tier in tiers)
    left = max(0, shares.quota_left(shares.datasets[dataset]))
    missing = reply.size_bytes - reply.resident_bytes
    if planned:
        room = max(
            room, shares.others_bytes + sum(tier.budget_bytes for tier in tiers) if shares.others_bytes else 0
        )
        reply.unfit_bytes = max(0, int(missing - min(room, left)))
    if reply.unfit_bytes:
        reply.lost_tiers.extend(tier.name for tier in node.policy.tiers.values() if tier.lost)
        reply.full_tiers.extend(tier.tier for tier in tiers if tier.full)
    if left < missing:
        reply.over_quota_bytes = max(0, reply.unfit_bytes - max(0, missing - room))
