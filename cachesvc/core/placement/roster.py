"""The roster: which members the cluster has, by what membership lists and what the listed addresses answer.

A member is its node name, never its address. It joins when an address that is listed answers a greeting. When it fails, or
is listed no more, it is away: it keeps its share of the extents for a grace period, so that a restart moves nothing, and
then it leaves. One that says goodbye is away in the same way, and its state tells people that nothing is wrong. A node that
answers with this node's own instance is this node.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

from cachesvc.core.limits import GREET_RETRY_CAP_S, GREET_RETRY_FIRST_S, GREET_S
from cachesvc.core.placement.view import Member, View
from cachesvc.core.rates.backoff import backoff_s

PROTOCOL_VERSION = 1
"""The version of the messages between nodes. It rises by one with each change that an older node would misread; it
ignores added fields."""
OLDEST_VERSION = PROTOCOL_VERSION - 1
"""Nodes that speak an older one are refused."""

State = Literal["present", "away", "left", "refused", "unknown"]
"""`left`: away since it said goodbye. `unknown`: an address that has not answered yet."""


@dataclass(frozen=True, slots=True)
class Greeting:
    """A node about itself. `instance` is another one after each start. `weight_bytes`: the room of its tiers, as
    configured."""

    name: str
    instance: str
    version: int
    weight_bytes: int
    zone: str = ""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address at which a listed member answers: HOST:PORT. `name` and `zone` are "" where the list does not know them;
    the member itself tells them in its greeting."""

    address: str
    name: str = ""
    zone: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """A member, or an address that is none. `since`: when a member went away, in seconds of the roster's clock. `why`: the
    reason why it is refused."""

    name: str
    address: str
    zone: str
    weight_bytes: int
    version: int
    state: State
    since: float = 0.0
    why: str = ""


@dataclass(slots=True)
class _Contact:
    """A listed address."""

    listed: Endpoint
    due_at: float
    failures: int = 0
    answered: Greeting | None = None
    """The last answer; None after a failure."""
    refused: str = ""
    forgotten: bool = False
    """An operator removed its member, and it has not answered since."""


@dataclass(slots=True)
class _Known:
    """A member that has joined and has not left."""

    greeting: Greeting
    member: Member
    address: str
    away_since: float = field(default=math.inf)
    said_goodbye: bool = False

    @property
    def away(self) -> bool:
        return self.away_since < math.inf


class Roster:
    """Members by name, and contacts by address. Times are seconds of any clock that does not go back."""

    def __init__(self, me: Greeting, grace_s: float, by_zone: bool = True) -> None:
        self._me = me
        self._grace_s = grace_s
        self._by_zone = by_zone
        self._listed = False
        self._contacts: dict[str, _Contact] = {}
        self._known: dict[str, _Known] = {}
        self._view: View | None = None

    def listed(self, endpoints: Iterable[Endpoint], now: float) -> None:
        """Take the list of members, this node included or not. New addresses are due at once."""
        by_address = {endpoint.address: endpoint for endpoint in endpoints}
        self._listed = True
        for address in [address for address in self._contacts if address not in by_address]:
            del self._contacts[address]
            self._leave_address(address, now)
        for address, endpoint in by_address.items():
            self._contacts.setdefault(address, _Contact(endpoint, now)).listed = endpoint
        self._expire(now)

    def greeted(self, address: str, greeting: Greeting, now: float) -> None:
        """Note the answer of an address."""
        self._expire(now)
        contact = self._contacts.get(address)
        if contact is None:
            return
        contact.answered, contact.failures, contact.forgotten = greeting, 0, False
        contact.due_at = math.inf if self._is_me(contact) else now + GREET_S
        contact.refused = self._why_refused(address, greeting)
        accepted = not (contact.refused or self._is_me(contact))
        self._leave_address(address, now, greeting.name if accepted else "")
        if accepted:
            self._join(contact, greeting)

    def failed(self, address: str, now: float) -> None:
        """Note that an address did not answer, or that its node failed in another way."""
        self._expire(now)
        contact = self._contacts.get(address)
        if contact is None or self._is_me(contact):
            return
        pause_s = backoff_s(contact.failures, GREET_RETRY_FIRST_S, GREET_RETRY_CAP_S)
        contact.failures, contact.due_at = contact.failures + 1, now + pause_s
        contact.answered, contact.refused = None, ""
        self._leave_address(address, now)

    def left(self, name: str, instance: str, now: float) -> None:
        """Note that a member says goodbye: it ends now, perhaps to start again."""
        known = self._known.get(name)
        if known is None or known.greeting.instance != instance or known.away:
            return
        self.failed(known.address, now)
        if not known.away:  # its address is not listed, or is another node's now
            known.away_since, self._view = now, None
        known.said_goodbye = True

    def heard(self, name: str, now: float) -> str:
        """Note that a member greets this node. One that was away has just started: it is due at once, and its address is
        returned; else ""."""
        known = self._known.get(name)
        if known is None or not known.away:
            return ""
        self.greet_soon(name, now)
        return known.address

    def weigh(self, weight_bytes: int) -> None:
        """Take another weight of this node. The others learn it when they greet this node."""
        self._me, self._view = replace(self._me, weight_bytes=weight_bytes), None

    def greet_soon(self, name: str, now: float) -> None:
        """Have a member greeted at once: it has something to tell."""
        known = self._known.get(name)
        if known is not None and (contact := self._contacts.get(known.address)) is not None:
            contact.due_at = min(contact.due_at, now)

    def forget(self, name: str) -> bool:
        """Drop a member that is away, and the row of its address until it answers; return whether there was one."""
        known = self._known.get(name)
        if known is None or not known.away:
            return False
        del self._known[name]
        self._view = None
        if (contact := self._contacts.get(known.address)) is not None:
            contact.forgotten = True
        return True

    def lists(self, address: str) -> bool:
        """Return whether an address is in the list of members."""
        return address in self._contacts

    @property
    def list_read(self) -> bool:
        """Whether a list of members has been read."""
        return self._listed

    def due(self, now: float) -> list[str]:
        """The addresses to greet now. Each is due again when it has answered or failed."""
        self._expire(now)
        addresses = [address for address, contact in self._contacts.items() if contact.due_at <= now]
        for address in addresses:
            self._contacts[address].due_at = now + GREET_RETRY_CAP_S
        return addresses

    def next_deadline(self) -> float:
        """The time when an address is due, or a member leaves, in seconds; inf for none."""
        dues = (contact.due_at for contact in self._contacts.values())
        ends = (known.away_since + self._grace_s for known in self._known.values())
        return min((*dues, *ends), default=math.inf)

    @property
    def settled(self) -> bool:
        """Membership has listed addresses, and each of them has answered or failed."""
        contacts = self._contacts.values()
        return self._listed and all(contact.answered or contact.failures for contact in contacts)

    def view(self) -> View:
        """The members now: the same object until they change."""
        if self._view is None:
            me = self._me
            others = (known.member for known in self._known.values())
            members = [Member(me.name, me.weight_bytes, me.zone), *others]
            members.sort(key=lambda member: member.name)
            away = frozenset(name for name, known in self._known.items() if known.away)
            self._view = View(me.name, tuple(members), away, self._by_zone)
        return self._view

    def address_of(self, name: str) -> str:
        """The address of another member of the view; "" for this node and for an unknown name."""
        known = self._known.get(name)
        return known.address if known else ""

    def knows(self, name: str) -> bool:
        """Return whether a node is another member, present or away."""
        return name in self._known

    def members(self) -> list[Row]:
        """This node, the members, and the addresses that are refused or have not answered yet, by name and address."""
        me = self._me
        mine = next((at for at, contact in self._contacts.items() if self._is_me(contact)), "")
        rows = [Row(me.name, mine, me.zone, me.weight_bytes, me.version, "present")]
        for known in self._known.values():
            state: State = "left" if known.said_goodbye else "away" if known.away else "present"
            since = known.away_since if known.away else 0.0
            rows.append(_row(known.greeting, known.member.zone, known.address, state, since))
        addresses = {known.address for known in self._known.values()}
        for address, contact in self._contacts.items():
            listed, answer = contact.listed, contact.answered
            if answer is not None and contact.refused:
                rows.append(_row(answer, answer.zone or listed.zone, address, "refused", why=contact.refused))
            elif answer is None and address not in addresses and not contact.forgotten:
                rows.append(Row(listed.name, address, listed.zone, 0, 0, "unknown"))
        return sorted(rows, key=lambda row: (row.name, row.address))

    def _is_me(self, contact: _Contact) -> bool:
        return contact.answered is not None and contact.answered.instance == self._me.instance

    def _why_refused(self, address: str, greeting: Greeting) -> str:
        """The reason to refuse a node; "" for none."""
        me, first = self._me, self._known.get(greeting.name)
        if greeting.instance == me.instance:
            return ""
        if greeting.version < OLDEST_VERSION:
            return f"{greeting.name} speaks version {greeting.version}; version {OLDEST_VERSION} is the oldest served"
        if me.version < greeting.version - 1:
            return (
                f"{greeting.name} speaks version {greeting.version} and serves {greeting.version - 1} at the oldest; this"
                f" node speaks {me.version}: update it"
            )
        if greeting.name == me.name:
            return f"{greeting.name} is this node's name too; give each node its own --node-name"
        if first is None or first.away or first.address == address:
            return ""
        if first.greeting.instance == greeting.instance:
            return ""
        return f"{greeting.name} is the name of {first.address} too; give each node its own --node-name"

    def _join(self, contact: _Contact, greeting: Greeting) -> None:
        """Note that a member is present. One with several addresses keeps the first that answers."""
        known, address = self._known.get(greeting.name), contact.listed.address
        if known is not None and not known.away and known.greeting == greeting:
            return
        member = Member(greeting.name, greeting.weight_bytes, greeting.zone or contact.listed.zone)
        self._known[greeting.name] = _Known(greeting, member, address)
        self._view = None

    def _leave_address(self, address: str, now: float, name: str = "") -> None:
        """Note that the member with this address, other than the one named, does not answer there now."""
        for known in self._known.values():
            if known.address == address and known.greeting.name != name and not known.away:
                known.away_since = now
                self._view = None

    def _expire(self, now: float) -> None:
        """Let members leave that have been away for the grace period."""
        for name in [n for n, known in self._known.items() if known.away_since + self._grace_s <= now]:
            del self._known[name]
            self._view = None


def _row(greeting: Greeting, zone: str, address: str, state: State, since: float = 0.0, why: str = "") -> Row:
    return Row(greeting.name, address, zone, greeting.weight_bytes, greeting.version, state, since, why)
