"""Streams the journal's events to callers who may see them."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import suppress

import grpc

from cachesvc.daemon.access.tenants import NO_USER, Peer, is_own_user
from cachesvc.daemon.control.messages import message_of
from cachesvc.daemon.events.event import Event
from cachesvc.daemon.events.journal import Journal
from cachesvc.daemon.loop.waiting import CallWaits
from cachesvc.v1 import cachesvc_pb2 as pb

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
