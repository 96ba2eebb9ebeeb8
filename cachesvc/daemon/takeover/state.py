"""The core's events as takeover.proto has them, both ways. A plan's extents travel as indices into its dataset."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from cachesvc.client.plan_memory import Columns
from cachesvc.core.events import Demanded, Event, HoldReported, Leased, Planned
from cachesvc.core.model import ExtentId, ReaderId, TierName
from cachesvc.daemon.grants.plans import entries_of
from cachesvc.daemon.grants.readers import Known
from cachesvc.v1 import takeover_pb2

KnownOf = Callable[[int], Known | None]
"""The dataset that a reader has been welcomed to."""
JobOf = Callable[[ReaderId], int]
"""What a reader has in common with others of its job: its connection says so, which is handed over too."""
UserOf = Callable[[ReaderId], int]
"""The uid at its other end."""


def put(state: Any, events: Iterable[Event], known_of: KnownOf) -> None:
    """Write events into a TakeoverState. A plan whose reader has no dataset is left out: its reader is gone."""
    for event in events:
        if isinstance(event, Planned):
            known = known_of(event.job)
            if known is not None:
                state.plans.append(_plan(event, known))
        else:
            state.leases.append(_lease(event))


def taken(state: Any, known_of: KnownOf, job_of: JobOf, user_of: UserOf) -> Iterator[Event]:
    """The events of a TakeoverState, in the order in which the core is to be told: what protects copies first.
    Raises InvalidInput for a plan that does not fit its dataset."""
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
            columns = Columns(each.extents, each.first_steps, each.last_steps, array("I", each.following))
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


def _plan(event: Planned, known: Known) -> Any:
    index_of = known.index_of
    return takeover_pb2.TakeoverPlan(
        reader=event.job,
        extents=[index_of[extent] for extent, _, _ in event.rows],
        first_steps=[first for _, first, _ in event.rows],
        last_steps=[last for _, _, last in event.rows],
        following=[index_of[extent] for extent in event.following],
        passed=event.passed,
    )
