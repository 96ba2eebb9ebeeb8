"""The members of the cluster as this node sees them: the roster, fed by the membership and by greetings.

One thread watches the membership; another greets members when the roster says so, and tells `changed` of each new view.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import grpc

import cachesvc
from cachesvc.cluster.membership import Endpoint, Membership
from cachesvc.core.placement.roster import PROTOCOL, Greeting, MemberRow, Roster
from cachesvc.core.placement.view import View
from cachesvc.daemon.peers.peer_calls import PeerCalls
from cachesvc.v1 import cachesvc_pb2 as pb

log = logging.getLogger(__name__)
GREETERS = 8
SETTLE_S = 5.0
"""How long after the start questions wait for the members' first greetings. Without them they would go to the wrong owners."""


class Members:
    """Safe from any thread."""

    def __init__(
        self, roster: Roster, calls: PeerCalls, hello: pb.HelloRequest, changed: Callable[[View], None]
    ) -> None:
        self._roster = roster
        self._calls = calls
        self._hello = hello
        self._changed = changed
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._settled = threading.Event()
        self._greeting: set[str] = set()
        self._pool = ThreadPoolExecutor(GREETERS, "greet")
        self._round_trips: dict[str, float] = {}
        self._view = roster.view()

    def start(self, membership: Membership) -> None:
        """Watch the membership and greet members from now on."""
        threading.Thread(
            target=membership.watch, args=(self._listed,), name="membership", daemon=True
        ).start()
        threading.Thread(target=self._run, name="greetings", daemon=True).start()

    @property
    def view(self) -> View:
        """The latest view."""
        return self._view

    def wait_settled(self, timeout_s: float) -> None:
        """Wait until each member has answered or failed once."""
        self._settled.wait(timeout_s)

    @property
    def settled(self) -> bool:
        """Each member has answered or failed once, or had its time."""
        return self._settled.is_set()

    def address_of(self, name: str) -> str:
        """The address of a member, HOST:PORT; "" for one that is unknown or away."""
        with self._lock:
            return self._roster.address_of(name)

    def failed(self, name: str, why: str) -> None:
        """Note that a member did not answer a call."""
        address = self.address_of(name)
        if address:
            self._note_failed(address, why)

    def rows(self) -> list[MemberRow]:
        """All members, for `cachesvc nodes`."""
        with self._lock:
            return self._roster.members(time.monotonic())

    def round_trip_s(self, address: str) -> float:
        """Seconds that the last greeting of a member took; 0 where there was none."""
        return self._round_trips.get(address, 0.0)

    def _listed(self, endpoints: frozenset[Endpoint]) -> None:
        with self._lock:
            self._roster.listed(endpoints, time.monotonic())
        self._calls.forget({endpoint.address for endpoint in endpoints})
        self._wake.set()

    def _run(self) -> None:
        settle_at = time.monotonic() + SETTLE_S
        while True:
            now = time.monotonic()
            with self._lock:
                due = [each for each in self._roster.due(now) if each not in self._greeting]
                self._greeting.update(due)
                next_at = self._roster.next_deadline()
                if self._roster.settled or now >= settle_at:
                    self._settled.set()
            for address in due:
                self._pool.submit(self._greet, address)
            self._update()
            limit = min(next_at, settle_at) if not self._settled.is_set() else next_at
            self._wake.wait(max(0.01, min(1.0, limit - time.monotonic())))
            self._wake.clear()

    def _greet(self, address: str) -> None:
        began = time.monotonic()
        try:
            reply = self._calls.hello(address, self._hello)
        except grpc.RpcError as error:
            self._note_failed(address, f"{error.code().name}: {error.details()}")
        else:
            self._round_trips[address] = time.monotonic() - began
            greeting = Greeting(
                name=reply.name,
                instance=reply.instance,
                protocol=reply.protocol,
                weight_bytes=reply.weight_bytes,
                zone=reply.zone,
                version=reply.version,
                extents=reply.extents,
            )
            with self._lock:
                self._roster.greeted(address, greeting, time.monotonic())
        finally:
            self._greeting.discard(address)
            self._wake.set()

    def _note_failed(self, address: str, why: str) -> None:
        with self._lock:
            self._roster.failed(address, time.monotonic(), why)
        self._wake.set()

    def _update(self) -> None:
        with self._lock:
            view = self._roster.view()
            if view == self._view:
                return
            self._view = view
        log.info("the cluster changed", extra={"members": len(view.members), "away": len(view.away)})
        self._changed(view)


def hello_request(name: str, instance: str) -> pb.HelloRequest:
    """Return this node's greeting."""
    return pb.HelloRequest(protocol=PROTOCOL, name=name, instance=instance)


def hello_reply(name: str, instance: str, weight_bytes: int, zone: str, extents: int) -> pb.HelloReply:
    """Return the answer to another node's greeting."""
    return pb.HelloReply(
        protocol=PROTOCOL,
        name=name,
        instance=instance,
        weight_bytes=weight_bytes,
        zone=zone,
        version=cachesvc.__version__,
        extents=extents,
    )
