"""What a prefetch has filled, and what of its dataset will not fit."""

from __future__ import annotations

from cachesvc.core.model import DatasetId
from cachesvc.daemon.datasets import Dataset
from cachesvc.daemon.runner import Runner
from cachesvc.v1 import cachesvc_pb2 as pb

MAX_FAILURES = 100
"""Named in one progress message; the rest is counted."""


def progress_of(runner: Runner, job: int, dataset: Dataset, planned: bool) -> pb.PrefetchReply:
    """How far a job's prefetch is; of one that is only `planned`, what there is now. On the loop's thread."""
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
        source_bytes=runner.fills.source_bytes(dataset.id),
        peer_bytes=runner.fills.peer_bytes(dataset.id),
        unfit_bytes=progress.stuck_bytes,
        failures=failures,
        done=planned or progress.finished,
    )
    if reply.done:
        _add_unfit(runner, reply, dataset.id, planned)
    return reply


def _add_unfit(runner: Runner, reply: pb.PrefetchReply, dataset: DatasetId, planned: bool) -> None:
    """Bytes of a dataset beyond its quotas and the room that nobody's kept extents take, where they are not known but
    planned; and how many of them are beyond quotas alone. An extent straddles no tiers, so it can be more by an
    extent a tier."""
    node = runner.node
    shares = node.policy.shares
    tiers = [tier for tier in node.status().tiers if not tier.lost]
    room = sum(max(0, tier.budget_bytes - tier.reserve_bytes - tier.kept_bytes) for tier in tiers)
    left = max(0, shares.quota_left(shares.datasets[dataset]))
    missing = reply.size_bytes - reply.resident_bytes
    if planned:
        reply.unfit_bytes = max(0, int(missing - min(room, left)))
    if reply.unfit_bytes:
        reply.lost_tiers.extend(tier.name for tier in node.policy.tiers.values() if tier.lost)
        reply.full_tiers.extend(tier.tier for tier in tiers if tier.full)
    if left < missing:
        reply.over_quota_bytes = max(0, reply.unfit_bytes - max(0, missing - room))
