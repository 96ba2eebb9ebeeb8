"""Builds the status messages of the daemon and its datasets, and streams events."""

from __future__ import annotations

import os
import queue
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import islice
from time import gmtime, strftime
from typing import TypeVar

import grpc
from google.protobuf.message import Message

import cachesvc
from cachesvc.catalog.options import Options
from cachesvc.core.node.node import Node
from cachesvc.daemon.access.tenants import NO_USER, Peer, admits, is_own_user
from cachesvc.daemon.control.activity import fill_messages, job_messages
from cachesvc.daemon.control.history import History, hit_rate
from cachesvc.daemon.control.pins import Pins
from cachesvc.daemon.datasets import Datasets, ServedDataset
from cachesvc.daemon.events.event import Event, words
from cachesvc.daemon.events.journal import Journal
from cachesvc.daemon.fills.fills import Fills
from cachesvc.daemon.fills.pool import FillerPool
from cachesvc.daemon.grants.server import GrantsServer
from cachesvc.daemon.loop.loop import Loop
from cachesvc.daemon.loop.waiting import CallWaits
from cachesvc.daemon.peers.cluster_link import ClusterLink
from cachesvc.daemon.peers.messages import ANSWERING, NodeRow
from cachesvc.daemon.residency import cells, sizes_of
from cachesvc.v1 import cachesvc_pb2 as pb

EVENTS = 20
"""The latest events in a snapshot."""


@dataclass(eq=False)
class Reports:
    """Takes snapshots for threads other than the loop's. `cluster` is None without one."""

    _loop: Loop
    _node: Node
    _datasets: Datasets
    _pins: Pins
    _grants: GrantsServer
    _fills: Fills
    _fillers: FillerPool
    _cluster: ClusterLink | None
    _history: History
    _journal: Journal
    _started: float = field(default_factory=time.monotonic)

    def snapshot(self, caller: Peer | None, allow: Sequence[str] = ()) -> pb.StatusReply:
        """Return this node at one moment, as a caller may see it. `allow`: the prefixes that the caller may use."""
        reply = self._loop.call(lambda: self._status(caller))
        reply.allow.extend(allow)
        reply.datasets.extend(self.datasets(caller))
        reply.nodes.extend(self.nodes().nodes)
        reply.events.extend(self._events(lambda event: may_see(event, caller)))
        return reply

    def nodes(self) -> pb.NodesReply:
        """Return the members of the cluster as the peer agent told them last."""
        if self._cluster is None:
            return pb.NodesReply()
        report = self._cluster.report
        return pb.NodesReply(
            nodes=[_node_message(row, report.me) for row in report.rows],
            clustered=True,
            list_read=report.list_read,
            warnings=[message_of(pb.ClusterWarning, each) for each in report.warnings],
        )

    def datasets(self, caller: Peer | None) -> list[pb.DatasetStatus]:
        """Return the datasets that a caller may see."""
        return [self._dataset_status(each) for each in self._listed() if admits(each.rules, caller)]

    def public(self) -> pb.StatusReply:
        """Return what any user of this machine may see: no user's number, and sums of the datasets with access rules."""
        reply = self.snapshot(None)
        shown = {each.dataset.id for each in reply.datasets}
        del reply.events[:]
        reply.events.extend(self._events(lambda event: event.dataset in shown or may_see(event, None)))
        for job in reply.jobs:
            job.user = ""
        for event in reply.events:
            event.uid, event.pid, event.job = NO_USER, 0, ""
        restricted = [each for each in self._listed() if each.rules]
        if restricted:
            reply.others.CopyFrom(self._sums(restricted))
        return reply

    def _sums(self, datasets: Sequence[ServedDataset]) -> pb.OtherDatasets:
        sums = pb.OtherDatasets(datasets=len(datasets))
        for dataset in datasets:
            status = self._dataset_status(dataset)
            sums.size_bytes += status.dataset.size_bytes
            sums.resident_bytes += status.resident_bytes
            sums.readers += status.readers
            sums.source_bytes += status.source_bytes
        return sums

    def _events(self, visible: Callable[[Event], bool]) -> list[pb.Event]:
        latest = islice(filter(visible, reversed(self._journal.since(0.0))), EVENTS)
        return [message_of(pb.Event, event, words=words(event)) for event in latest][::-1]

    def _listed(self) -> list[ServedDataset]:
        return self._loop.call(lambda: self._datasets.listed(self._grants.readers()))

    def _dataset_status(self, dataset: ServedDataset) -> pb.DatasetStatus:
        places, message = [self._node.where(each) for each in dataset.extent_ids], dataset_message(dataset)
        found, filling = self._loop.call(lambda: (self._counted(dataset, message), self._filling(dataset)))
        sizes = sizes_of(self._node, dataset)
        found.dataset.size_bytes = sum(sizes)
        here = [size for size, place in zip(sizes, places, strict=True) if place is not None]
        found.resident_bytes, found.resident_extents = sum(here), len(here)
        for ram, nvme, fills in cells(sizes, places, filling):
            found.residency.ram.append(ram)
            found.residency.nvme.append(nvme)
            found.residency.filling.append(fills)
        return found

    def _filling(self, dataset: ServedDataset) -> set[int]:
        extents = (fill.command.extent for fill in self._fills.reading())
        return {dataset.index_of[extent] for extent in extents if extent in dataset.index_of}

    def _status(self, caller: Peer | None) -> pb.StatusReply:
        fills = self._fills.reading()
        tiers = [
            message_of(pb.TierStatus, tier, corrupt_extents=tier.corrupt_count, full=tier.takes_nothing)
            for tier in self._node.policy.tiers.values()
        ]
        return pb.StatusReply(
            version=cachesvc.__version__,
            pid=os.getpid(),
            node=os.uname().nodename,
            now_s=time.time(),
            uptime_s=time.monotonic() - self._started,
            tiers=tiers,
            readers=self._grants.readers().total(),
            fills_running=len(self._node.copies.filling),
            sources=message_of(pb.SourceStatus, self._fillers.source_requests),
            cluster=self._cluster_status(),
            throughput=self._history.throughput(),
            history=self._history.message(),
            jobs=job_messages(self._node, self._grants.connected(), fills, caller),
            bypassed=self._grants.bypass.on,
            fills=fill_messages(fills, self._datasets, caller),
        )

    def _cluster_status(self) -> pb.ClusterStatus | None:
        if self._cluster is None:
            return None
        report, received_bytes = self._cluster.report, self._fills.counts.received.total()
        states = Counter(row.state for row in report.rows)
        return message_of(
            pb.ClusterStatus,
            report,
            received_bytes=received_bytes,
            present=states["present"],
            away=states["away"] + states["left"],
            left=states["left"],
            warnings=[message_of(pb.ClusterWarning, each) for each in report.warnings],
        )

    def _counted(self, dataset: ServedDataset, message: pb.Dataset) -> pb.DatasetStatus:
        counters, over_time = self._node.counters(dataset.id), self._history.hits(dataset.id)
        return message_of(
            pb.DatasetStatus,
            counters,
            dataset=message,
            readers=self._grants.readers()[dataset.id],
            pinned=dataset.id in self._pins,
            source_bytes=self._fills.counts.source_bytes(dataset.id),
            peer_bytes=self._fills.counts.peer_bytes(dataset.id),
            listed_at=self._datasets.stale.get(dataset.id, 0),
            epochs=[message_of(pb.EpochStatus, each) for each in counters.epochs],
            hit_rate=hit_rate(counters),
            hit_rates=[round(rate, 4) for rate, _ in over_time],
            bounds=[round(bound, 4) for _, bound in over_time],
        )


def _node_message(row: NodeRow, me: str) -> pb.NodeStatus:
    found = message_of(pb.NodeStatus, row, me=row.name == me and row.state in ANSWERING)
    found.MergeFrom(message_of(pb.NodeStatus, row.traits))
    return found


BEHIND = 4096
"""Events that a follower has not taken; those beyond are left out of its stream."""


class EventStream:
    """Runs on the threads of the calls."""

    def __init__(self, journal: Journal, waiting: CallWaits) -> None:
        self._journal, self._waiting = journal, waiting

    def run(
        self, request: pb.EventsRequest, caller: Peer | None, context: grpc.ServicerContext
    ) -> Iterator[pb.Event]:
        """Yield the kept events, and with `follow` each new one until the caller leaves. Raises DaemonUnavailable when the
        daemon stops."""
        if not request.follow:
            yield from _messages(self._journal.since(request.since), caller)
            return
        coming: queue.Queue[Event] = queue.Queue(BEHIND)

        def heard(event: Event) -> None:
            with suppress(queue.Full):
                coming.put_nowait(event)

        past = self._journal.listen(heard, request.since)
        try:
            yield from _messages(past, caller)
            while True:
                yield from _messages([self._waiting.next(coming, context)], caller)
        finally:
            self._journal.ignore(heard)


def _messages(events: list[Event], caller: Peer | None) -> Iterator[pb.Event]:
    return (message_of(pb.Event, event) for event in events if may_see(event, caller))


def may_see(event: Event, caller: Peer | None) -> bool:
    """Tell whether a caller may see an event: the daemon's own user sees all, other users see their own events and those
    without a user or a dataset."""
    if is_own_user(caller) or (caller is not None and event.uid == caller.uid):
        return True
    return event.uid == NO_USER and not event.uri and not event.dataset


_M = TypeVar("_M", bound=Message)


def message_of(kind: type[_M], source: object, **more: object) -> _M:
    """Return a message with `more`, and with the other fields that `source` has as attributes."""
    names = set(kind.DESCRIPTOR.fields_by_name).difference(more)
    return kind(**{name: getattr(source, name) for name in names if hasattr(source, name)}, **more)


def options_of(given: pb.DatasetOptions, extent_bytes: int) -> Options:
    """Return a caller's options, with the daemon's default extent size where the caller gave none."""
    option: Callable[[str], object] = partial(getattr, given)
    plain = {field.name: option(field.name) for field in fields(Options)}
    plain["extent_bytes"] = plain["extent_bytes"] or extent_bytes
    return Options(**plain)  # type: ignore[arg-type]


def dataset_message(dataset: ServedDataset) -> pb.Dataset:
    """Return a dataset's message for a caller who may see it."""
    return message_of(
        pb.Dataset,
        dataset.catalog,
        id=dataset.id,
        extents=len(dataset.extent_ids),
        size_bytes=dataset.size_bytes,
    )


def stale_text(dataset: ServedDataset, listed_at: int, why: str) -> str:
    """Return the warning of an opening while the source is down."""
    at = strftime("%Y-%m-%d %H:%M:%S UTC", gmtime(listed_at))
    return (
        f"{dataset.catalog.uri}: the source is down, so this is version {dataset.id}, listed at {at}; what changed since is"
        f" not seen ({why})"
    )
