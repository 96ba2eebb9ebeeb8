"""The members of the cluster as this node sees them: the roster, fed by the membership and by greetings.

One thread watches the membership; another greets members when the roster says so. `changed` gets each new view,
`restarted` the name of a member that has started anew, with an empty directory, `listed` the addresses of each list, and
`greeted` the name and the address of each member that answered.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import grpc

from cachesvc.cluster.membership import Membership
from cachesvc.core.placement.roster import Endpoint, Greeting, Roster, Row
from cachesvc.core.placement.view import View
from cachesvc.daemon.peers.messages import NodeRow
from cachesvc.daemon.peers.peer_calls import PeerCalls
from cachesvc.v1 import cachesvc_pb2 as pb

log = logging.getLogger(__name__)
GREETERS = 8
SETTLE_S = 5.0
"""How long after the start questions wait for the members' first greetings; else they would go to the wrong owners."""


@dataclass(slots=True)
class _Contact:
    """An address: the release of its node, the extents that the node holds, the seconds that the last greeting took, and
    the error of the last call that failed."""

    release: str = ""
    extents: int = 0
    round_trip_s: float = 0.0
    error: str = ""


class Members:
    """Safe from any thread."""

    def __init__(
        self,
        roster: Roster,
        calls: PeerCalls,
        hello: pb.HelloRequest,
        changed: Callable[[View], None],
        restarted: Callable[[str], None],
        listed: Callable[[set[str]], None],
        settle_s: float = SETTLE_S,
        greeted: Callable[[str, str], None] = lambda name, address: None,
    ) -> None:
        self._roster = roster
        self._calls = calls
        self._hello = hello
        self._changed = changed
        self._restarted = restarted
        self._on_listed = listed
        self._on_greeted = greeted
        self._instances: dict[str, str] = {}
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._settled = threading.Event()
        self._settle_s, self._settle_at = settle_s, time.monotonic() + settle_s
        self._greeting: set[str] = set()
        self._pool = ThreadPoolExecutor(GREETERS, "greet")
        self._contacts: dict[str, _Contact] = {}
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

    def wait_settled(self) -> None:
        """Wait until each member has answered or failed once, up to `SETTLE_S` after this process began: the addresses of
        this node may be in use for longer, and fills must not wait for them."""
        self._settled.wait(max(0.0, self._settle_at - time.monotonic()))

    @property
    def waited(self) -> bool:
        """There is nothing to wait for: `wait_settled` returns at once."""
        return self._settled.is_set() or time.monotonic() >= self._settle_at

    @property
    def settled(self) -> bool:
        """Each member has answered or failed once, or had its time."""
        return self._settled.is_set()

    def address_of(self, name: str) -> str:
        """The address of a member, HOST:PORT; "" for one that is unknown or away."""
        with self._lock:
            return "" if name in self._roster.view().away else self._roster.address_of(name)

    def failed(self, name: str, why: str) -> None:
        """Note that a member did not answer a call."""
        address = self.address_of(name)
        if address:
            self._note_failed(address, why)

    def rows(self) -> tuple[NodeRow, ...]:
        """All members and refused nodes, for `cachesvc nodes`."""
        now = time.monotonic()
        with self._lock:
            rows = self._roster.members()
        return tuple(_row(each, self._contacts.get(each.address) or _Contact(), now) for each in rows)

    def _listed(self, endpoints: frozenset[Endpoint]) -> None:
        with self._lock:
            self._roster.listed(endpoints, time.monotonic())
            self._instances = {
                name: each for name, each in self._instances.items() if self._roster.knows(name)
            }
        addresses = {endpoint.address for endpoint in endpoints}
        for address in self._contacts.keys() - addresses:
            self._contacts.pop(address, None)
        self._calls.forget(addresses)
        self._wake.set()
        self._on_listed(addresses)

    def _run(self) -> None:
        settle_at = time.monotonic() + self._settle_s
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
            self._contacts[address] = _Contact(reply.release, reply.extents, time.monotonic() - began)
            greeting = Greeting(reply.name, reply.instance, reply.protocol, reply.weight_bytes, reply.zone)
            with self._lock:
                self._roster.greeted(address, greeting, time.monotonic())
                former = self._instances.get(reply.name)
                self._instances[reply.name] = reply.instance
            if former not in (None, reply.instance):
                self._restarted(reply.name)
            if self.address_of(reply.name) == address:
                self._on_greeted(reply.name, address)
        finally:
            self._greeting.discard(address)
            self._wake.set()

    def _note_failed(self, address: str, why: str) -> None:
        self._contacts.setdefault(address, _Contact()).error = why
        with self._lock:
            self._roster.failed(address, time.monotonic())
        self._wake.set()

    def _update(self) -> None:
        with self._lock:
            view = self._roster.view()
            if view is self._view:
                return
            self._view = view
        log.info("the cluster changed", extra={"members": len(view.members), "away": len(view.away)})
        self._changed(view)


def _row(row: Row, contact: _Contact, now: float) -> NodeRow:
    return NodeRow(
        name=row.name,
        address=row.address,
        zone=row.zone,
        release=contact.release,
        weight_bytes=row.weight_bytes,
        extents=contact.extents,
        state=row.state,
        away_s=int(now - row.since) if row.state == "away" else 0,
        why=row.why or ("" if row.state == "present" else contact.error),
        round_trip_us=int(contact.round_trip_s * 1e6),
    )
