"""Builds messages of this node's readers, with their waits, and of the fills under way. Runs on the loop's thread."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from cachesvc.core.model import ExtentId
from cachesvc.core.node.node import Node
from cachesvc.core.stalls import CAUSES
from cachesvc.daemon.access.tenants import Peer, admits
from cachesvc.daemon.datasets import Datasets
from cachesvc.daemon.fills.fill import FROM_SOURCE, Fill
from cachesvc.daemon.grants.reader_events import ConnectedReader
from cachesvc.v1 import cachesvc_pb2 as pb

MAX_READERS = 256
"""Readers in one report; those that wait come first."""
MAX_FILLS = 64
RECENT_S = 15.0
"""The age up to which reports of ranks count. A rank sends one every 5 s while it takes batches."""
LEAST_SHARE = 0.005
"""A smaller part of the time is no wait worth a word."""


def job_messages(
    node: Node, readers: Sequence[ConnectedReader], fills: Sequence[Fill], caller: Peer | None
) -> list[pb.JobStatus]:
    """Return the jobs whose datasets the caller may see, those that wait longest first."""
    seen = [each for each in readers if each.dataset is not None and admits(each.dataset.rules, caller)]
    states = node.readers.readers

    def rests(reader: ConnectedReader) -> bool:
        return reader.id not in states or not states[reader.id].waiting

    jobs: dict[int, pb.JobStatus] = {}
    reading = {fill.command.extent: fill for fill in fills}
    for number, reader in enumerate(sorted(seen, key=rests)):
        job = jobs.setdefault(reader.job or -reader.id, pb.JobStatus(id=_name(reader)))
        job.user, job.readers_connected = str(reader.peer.uid), job.readers_connected + 1
        if number < MAX_READERS:
            job.readers.append(_reader_message(node, reader, reading))
    for job in jobs.values():
        _sum_up(job)
    return sorted(jobs.values(), key=lambda job: -max((each.waiting_s for each in job.readers), default=0.0))


def fill_messages(fills: Sequence[Fill], datasets: Datasets, caller: Peer | None) -> list[pb.FillStatus]:
    """Return the fills of datasets that the caller may see."""
    found, now = [], time.monotonic()
    for fill in fills[:MAX_FILLS]:
        home = datasets.dataset_with(fill.command.extent)
        if home is not None and admits(home[0].rules, caller):
            dataset, index = home
            found.append(
                pb.FillStatus(
                    dataset=dataset.id,
                    extent=index,
                    size_bytes=dataset.sizes[index],
                    tier=fill.command.tier,
                    reads=fill.reads,
                    age_s=now - fill.began,
                )
            )
    return found


def _name(reader: ConnectedReader) -> str:
    """Return the name of a reader's job: eight digits of the number that its readers share."""
    return f"{reader.job & (1 << 64) - 1:016x}"[:8] if reader.job else f"reader {reader.id}"


def _reader_message(node: Node, reader: ConnectedReader, reading: Mapping[ExtentId, Fill]) -> pb.ReaderStatus:
    assert reader.dataset is not None, "a reader of a dataset"
    status, now = node.reader(reader.id), time.monotonic()
    waiting = [*status.filling, *status.retried, *status.queued]
    found = pb.ReaderStatus(
        number=reader.id,
        pid=reader.peer.pid,
        dataset=reader.dataset.id,
        step=status.step,
        steps=status.steps,
        leased_extents=status.leased_extents,
        waiting_extents=len(waiting),
        waiting_s=now - status.waiting_since if waiting else 0.0,
    )
    if recent := [each for each in reader.reports if now - each.at < RECENT_S]:
        interval_s = max(recent[-1].at - recent[0].since, 1e-3)
        found.batches_per_s = sum(each.stalls.steps for each in recent) / interval_s
        waited_us = map(sum, zip(*(each.stalls.waited_us for each in recent)))
        for cause, each_us in zip(CAUSES, waited_us, strict=True):
            share = min(1.0, each_us / 1e6 / interval_s)
            if share >= LEAST_SHARE:
                found.waits.add(cause=cause, share=share)
    if status.filling:
        places = {_place(reading.get(extent)) for extent in status.filling}
        found.waits_for = f"{' and '.join(sorted(places))}, {_amount(found)}"
    elif status.retried:
        found.waits_for = f"another try of a failed fill, {_amount(found)}"
    elif status.queued:
        found.waits_for = f"a slot or room for a fill, {_amount(found)}"
    elif found.waits:
        most = max(found.waits, key=lambda each: each.share)
        found.waits_for = f"{most.cause}, {100 * most.share:.0f} % of time"
    return found


def _place(fill: Fill | None) -> str:
    if fill is None or not fill.reads:
        return "a filler"
    tier = fill.command.from_tier
    return f"the {FROM_SOURCE}" if fill.reads == FROM_SOURCE else fill.reads if tier else f"node {fill.reads}"


def _amount(reader: pb.ReaderStatus) -> str:
    extents = f"{reader.waiting_extents:,} extent{'s' if reader.waiting_extents > 1 else ''}"
    return extents + (f" for {reader.waiting_s:.0f} s" if reader.waiting_s >= 1 else "")


def _sum_up(job: pb.JobStatus) -> None:
    """Set what a job says of all its readers."""
    readers = job.readers
    job.batches_per_s = sum(each.batches_per_s for each in readers)
    job.waiting = max(map(waited_share, readers), default=0.0)
    worst = max(
        (each for each in readers if each.waits_for),
        key=lambda each: (each.waiting_s, waited_share(each)),
        default=None,
    )
    job.waits_for = worst.waits_for if worst else ""


def waited_share(reader: pb.ReaderStatus) -> float:
    """Return the part of its time, from 0 to 1, that a rank waited."""
    return min(1.0, sum(each.share for each in reader.waits))
