"""Conversion between the core's events and messages of takeover.proto. A plan names extents by index in its dataset."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from cachesvc.client.plan_memory import PlanColumns
from cachesvc.core.events import Demanded, Event, HoldReported, Leased, Planned
from cachesvc.core.model import ExtentId, ReaderId, TierName
from cachesvc.daemon.grants.connected_readers import GrantableDataset
from cachesvc.daemon.grants.plan_intake import entries_of
from cachesvc.v1 import takeover_pb2

KnownOf = Callable[[int], GrantableDataset | None]
"""Returns the dataset of a reader, or None."""
JobOf = Callable[[ReaderId], int]
"""Returns the job of a reader, which its connection told and which is handed over with the connection."""
UserOf = Callable[[ReaderId], int]
"""Returns the uid of a reader."""


def write_events(state: Any, events: Iterable[Event], known_of: KnownOf) -> None:
    """Write events into a TakeoverState, except plans of readers without a dataset, which have left."""
    for event in events:
        if isinstance(event, Planned):
            known = known_of(event.job)
            if known is not None:
                state.plans.append(_plan(event, known))
        else:
            state.leases.append(_lease(event))


def read_events(state: Any, known_of: KnownOf, job_of: JobOf, user_of: UserOf) -> Iterator[Event]:
    """Yield the events of a TakeoverState in the order for the core: leases and holds, which protect copies, first.

    Raises InvalidInput for a plan that does not fit its dataset.
    """
    pb = takeover_pb2.TakeoverLease
    for each in sorted(state.leases, key=lambda lease: lease.kind == pb.DEMANDED):
        reader, extent = ReaderId(each.reader), ExtentId(each.extent)
        if known_of(reader) is None:
            continue
        if each.kind == pb.LEASED:
            yield Leased(reader, extent, TierName(each.tier), each.size_bytes)
        elif each.kind == pb.HELD:
            yield HoldReported(reader, extent, each.size_bytes, user_of(reader))
        elif each.kind == pb.DEMANDED:
            yield Demanded(reader, each.request, extent, size_bytes=each.size_bytes, job=job_of(reader))
    for each in state.plans:
        known = known_of(each.reader)
        if known is not None:
            columns = PlanColumns(each.extents, each.first_steps, each.last_steps, array("I", each.following))
            rows = entries_of(columns, known.extent_ids)
            reader = ReaderId(each.reader)
            yield Planned(reader, reader, *rows, each.passed, job_of(reader), user_of(reader))


def _lease(event: Event) -> Any:
    pb = takeover_pb2.TakeoverLease
    if isinstance(event, Leased):
        return pb(
            kind=pb.LEASED,
            reader=event.reader,
            extent=event.extent,
            size_bytes=event.size_bytes,
            tier=event.tier,
        )
    if isinstance(event, HoldReported):
        return pb(kind=pb.HELD, reader=event.reader, extent=event.extent, size_bytes=event.size_bytes)
    assert isinstance(event, Demanded)
    return pb(
        kind=pb.DEMANDED,
        reader=event.reader,
        extent=event.extent,
        size_bytes=event.size_bytes,
        request=event.request,
    )


def _plan(event: Planned, known: GrantableDataset) -> Any:
    index_of = known.index_of
    return takeover_pb2.TakeoverPlan(
        reader=event.job,
        extents=[index_of[extent] for extent, _, _ in event.rows],
        first_steps=[first for _, first, _ in event.rows],
        last_steps=[last for _, _, last in event.rows],
        following=[index_of[extent] for extent in event.following],
        passed=event.passed,
    )
