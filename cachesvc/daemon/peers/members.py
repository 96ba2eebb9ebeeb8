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
from dataclasses import dataclass, field
from typing import TypeVar

import grpc

from cachesvc.cluster.polled import Membership
from cachesvc.core.errors import InvalidInput, NotFound
from cachesvc.core.placement.roster import PROTOCOL_VERSION, Endpoint, Greeting, Roster, Row
from cachesvc.core.placement.traits import Traits
from cachesvc.core.placement.view import View
from cachesvc.daemon.peers.messages import NodeRow
from cachesvc.daemon.peers.peer_calls import PeerCalls, reason
from cachesvc.v1 import cachesvc_pb2 as pb

GREETERS = 8
UNLIST_S = 1.0
"""How long the end waits for the removal of this node's entry in the list of members."""
TELLERS = 16
"""Members that are told at a time that this node ends, or that one is to be forgotten."""
SETTLE_S = 5.0
"""How long questions wait for the members' first greetings after their list was read; else they would go to the wrong
owners."""
log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Contact:
    """An address: what its node told of itself, the seconds that the last greeting took, and the error of the last call
    that failed."""

    traits: Traits = field(default_factory=Traits)
    round_trip_s: float = 0.0
    error: str = ""


_Answer = TypeVar("_Answer")


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
        own: Callable[[], Traits] = Traits,
        list_wait_s: float = 0.0,
    ) -> None:
        """`own` returns what this node tells of itself now. Questions wait `list_wait_s` for the first list of members."""
        self._roster = roster
        self._calls = calls
        self._hello = hello
        self._changed = changed
        self._restarted = restarted
        self._on_listed = listed
        self._on_greeted = greeted
        self._own = own
        self._membership: Membership | None = None
        self._instances: dict[str, str] = {}
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._settled = threading.Event()
        self._settle_s, self._settle_at = settle_s, time.monotonic() + settle_s
        self._list_wait_s = list_wait_s
        self._greeting: set[str] = set()
        self._pool = ThreadPoolExecutor(GREETERS, "greet")
        self._contacts: dict[str, _Contact] = {}
        self._view = roster.view()

    def start(self, membership: Membership) -> None:
        """Watch the membership and greet members from now on."""
        self._membership = membership
        self._settle_at = max(self._settle_at, time.monotonic() + self._list_wait_s)
        self._watching = threading.Thread(
            target=membership.watch, args=(self._listed,), name="membership", daemon=True
        )
        self._watching.start()
        threading.Thread(target=self._run, name="greetings", daemon=True).start()

    @property
    def view(self) -> View:
        """The latest view."""
        return self._view

    def wait_settled(self) -> None:
        """Wait until each member has answered or failed once, up to `SETTLE_S` after their list was read. Before `start`,
        wait up to `SETTLE_S`: the addresses of this node may be in use for longer, and fills must not wait for them."""
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

    @property
    def list_read(self) -> bool:
        """Whether a list of members has been read."""
        return self._roster.list_read

    @property
    def trouble(self) -> str:
        """Why the list of members cannot be read now; "" while it can."""
        return self._membership.trouble if self._membership is not None else ""

    def leave(self, for_good: bool = False) -> None:
        """Say goodbye to the members that are present, and end this node's entry in the list where it has one. `for_good`:
        have them forget this node."""
        goodbye = pb.HelloRequest()
        goodbye.CopyFrom(self._hello)
        goodbye.leaving = True
        if self._membership is not None:
            self._membership.close()
        self.ask_present(lambda address: self._calls.hello(address, goodbye))
        if for_good:
            request = pb.ForgetRequest(protocol=PROTOCOL_VERSION, node=self._hello.name)
            self.ask_present(lambda address: self._calls.forget_member(address, request))
        if self._membership is not None:
            self._watching.join(UNLIST_S)

    def heard(self, name: str) -> None:
        """Note that a node greets this one."""
        with self._lock:
            back_at = self._roster.heard(name, time.monotonic())
        if back_at:
            self._calls.reconnect(back_at)
        self._wake.set()

    def weigh(self, weight_bytes: int) -> None:
        """Take another weight of this node."""
        with self._lock:
            self._roster.weigh(weight_bytes)
        self._update()

    def greet_soon(self, name: str) -> None:
        """Greet a member at once, which has something to tell."""
        with self._lock:
            self._roster.greet_soon(name, time.monotonic())
        self._wake.set()

    def left(self, name: str, instance: str) -> None:
        """Note that a member said goodbye."""
        with self._lock:
            self._roster.left(name, instance, time.monotonic())
        self._wake.set()

    def forget(self, name: str) -> bool:
        """Forget a member that is away; return whether there was one."""
        with self._lock:
            known = self._roster.forget(name)
        self._wake.set()
        return known

    def forget_everywhere(self, name: str) -> tuple[tuple[str, ...], bool]:
        """Have all present members forget one that is away. Return the names of those that could not be told, and whether
        the list of members still has its address.

        Raises NotFound where there is no member of that name, InvalidInput for one that answers.
        """
        with self._lock:
            address = self._roster.address_of(name)
            listed = self._roster.lists(address)
        if self.address_of(name):
            raise InvalidInput(f"{name} answers at {address}, so it cannot be removed; stop it first")
        if not self.forget(name):
            raise NotFound(f"there is no member {name!r} that is away; see `cachesvc nodes`")
        request = pb.ForgetRequest(protocol=PROTOCOL_VERSION, node=name)
        _, failed = self.ask_present(lambda address: self._calls.forget_member(address, request))
        return tuple(failed), listed

    def ask_present(self, call: Callable[[str], _Answer]) -> tuple[dict[str, _Answer], dict[str, str]]:
        """Make a call to all present members at once; return their answers, and why others gave none, by name."""
        with self._lock:
            view = self._roster.view()
            others = {
                each.name: self._roster.address_of(each.name)
                for each in view.members
                if each.name != view.me and each.name not in view.away
            }

        answers: dict[str, _Answer] = {}
        failed: dict[str, str] = {}

        def ask(name: str) -> None:
            try:
                answers[name] = call(others[name])
            except grpc.RpcError as error:
                failed[name] = reason(error)

        with ThreadPoolExecutor(TELLERS, "tell") as pool:
            list(pool.map(ask, others))
        return answers, failed

    def failed(self, name: str, why: str) -> None:
        """Note that a member did not answer a call."""
        address = self.address_of(name)
        if address:
            self._note_failed(address, why)

    def rows(self) -> tuple[NodeRow, ...]:
        """All members and refused nodes, for `cachesvc nodes`."""
        now, own = time.monotonic(), self._own()
        with self._lock:
            rows, me = self._roster.members(), self._view.me
        found = []
        for each in rows:
            contact = self._contacts.get(each.address)
            mine = each.name == me and each.state == "present"
            found.append(_row(each, contact, own if mine else contact.traits if contact else Traits(), now))
        return tuple(found)

    def _listed(self, endpoints: frozenset[Endpoint]) -> None:
        with self._lock:
            if not self._roster.list_read:
                self._settle_at = time.monotonic() + self._settle_s
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
        while True:
            now = time.monotonic()
            with self._lock:
                settle_at = self._settle_at
                due = [each for each in self._roster.due(now) if each not in self._greeting]
                self._greeting.update(due)
                next_at = self._roster.next_deadline()
                if self._roster.settled or now >= settle_at:
                    self._settle()
            for address in due:
                self._pool.submit(self._greet, address)
            self._update()
            limit = min(next_at, settle_at) if not self._settled.is_set() else next_at
            self._wake.wait(max(0.01, min(1.0, limit - time.monotonic())))
            self._wake.clear()

    def _settle(self) -> None:
        if not self._settled.is_set() and not self._roster.list_read:
            late = {"waited_s": self._list_wait_s, "reason": self.trouble}
            log.warning(
                "no list of members was read in time; this node works alone until there is one", extra=late
            )
        self._settled.set()

    def _greet(self, address: str) -> None:
        began = time.monotonic()
        try:
            reply = self._calls.hello(address, self._hello)
        except grpc.RpcError as error:
            unavailable = error.code() is grpc.StatusCode.UNAVAILABLE
            trouble = self._calls.certificate_trouble(address) if unavailable else ""
            self._note_failed(address, trouble or reason(error))
        else:
            self._contacts[address] = _Contact(_traits(reply), time.monotonic() - began)
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
        self._changed(view)


def _traits(reply: pb.HelloReply) -> Traits:
    return Traits(
        release=reply.release,
        extents=reply.extents,
        free_bytes=reply.free_bytes,
        source=reply.source,
        extent_bytes=reply.extent_bytes,
        domain=reply.domain,
        allow=tuple(reply.allow),
        blocks=reply.blocks,
        certificate_ends=reply.certificate_ends,
    )


def _row(row: Row, contact: _Contact | None, traits: Traits, now: float) -> NodeRow:
    """Return a row. `contact`: of its address, None where it is listed no more."""
    gone = row.state in ("away", "left")
    why = "it is listed no more" if contact is None and gone else contact.error if contact else ""
    return NodeRow(
        name=row.name,
        address=row.address,
        zone=row.zone,
        weight_bytes=row.weight_bytes,
        state=row.state,
        away_s=int(now - row.since) if gone else 0,
        why=row.why or ("" if row.state == "present" else why),
        round_trip_us=int(contact.round_trip_s * 1e6) if contact else 0,
        traits=traits,
    )
