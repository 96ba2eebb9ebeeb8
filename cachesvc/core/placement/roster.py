"""The members of the cluster: who is listed, who answers, and who is away for a while.

A member is known by its node name, never by its address. An address is greeted when it is listed, and again now and then;
its greeting tells the name, the weight, and a number that the node drew at its start, its `instance`. A member that does
not answer, or is not listed any more, is away: it keeps its share for a grace period, so that a restart moves nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from cachesvc.core.placement.view import Member, View

PROTOCOL = 1
OLDEST_PROTOCOL = 1
"""Members of the last protocol before this one are served; there was none before the first."""
GREET_S = 10.0
"""The pause between greetings of a member that answers."""
FIRST_RETRY_S, LAST_RETRY_S = 1.0, 30.0
"""Pauses between greetings of a member that does not; they double."""

State = Literal["present", "away", "refused"]


@dataclass(frozen=True, slots=True)
class Greeting:
    """What a node tells about itself. `protocol`: the one that it speaks; `version`: its release; `extents`: how many it
    holds."""

    name: str
    instance: str
    protocol: int
    weight_bytes: int
    zone: str = ""
    version: str = ""
    extents: int = 0


@dataclass(frozen=True, slots=True)
class MemberRow:
    """A member, for people. `since_s`: how long it has been in its state; `why`: of one that is away or refused."""

    name: str
    address: str
    zone: str
    version: str
    weight_bytes: int
    extents: int
    state: State
    since_s: float
    why: str


@dataclass(slots=True, eq=False)
class _Contact:
    """An address, and what answered there last."""

    address: str
    greet_at: float
    listed: bool = True
    answers: bool = False
    tried: bool = False
    greeting: Greeting | None = None
    refused: str = ""
    why: str = ""
    retry_s: float = 0.0
    since: float = 0.0
    """When its state changed last."""

    @property
    def present(self) -> bool:
        return self.listed and self.answers and not self.refused


@dataclass(slots=True)
class Roster:
    """Contacts by address. `me` is this node, which `instance` identifies among the contacts. Times are in seconds."""

    me: Member
    instance: str
    grace_s: float
    by_zone: bool
    _contacts: dict[str, _Contact] = field(default_factory=dict)
    _listed_once: bool = False

    def listed(self, addresses: Iterable[str], now: float) -> None:
        """Take the list of addresses that the membership gives. New ones are greeted at once."""
        self._listed_once = True
        wanted = set(addresses)
        for address in wanted:
            contact = self._contacts.get(address)
            if contact is None:
                self._contacts[address] = _Contact(address, now, since=now)
            elif not contact.listed:
                contact.listed, contact.greet_at, contact.tried = True, now, False
        for contact in self._contacts.values():
            if contact.listed and contact.address not in wanted:
                contact.listed = False
                self._away(contact, now, "not listed any more")

    def greeted(self, address: str, greeting: Greeting, now: float) -> None:
        """Note the answer to a greeting."""
        contact = self._contacts.get(address)
        if contact is None:
            return
        was_present = contact.present
        contact.greeting, contact.answers, contact.tried, contact.retry_s = greeting, True, True, 0.0
        contact.greet_at = now + GREET_S
        contact.refused = self._refusal(contact, greeting)
        contact.why = contact.refused
        if contact.present != was_present:
            contact.since = now
        if contact.present:  # the node has moved here from another address
            for other in [each for each in self._contacts.values() if each is not contact]:
                if other.greeting and other.greeting.name == greeting.name and not other.present:
                    other.greeting = None

    def failed(self, address: str, now: float, why: str) -> None:
        """Note that an address did not answer a greeting or another call."""
        contact = self._contacts.get(address)
        if contact is None:
            return
        contact.tried = True
        contact.retry_s = min(LAST_RETRY_S, 2 * contact.retry_s or FIRST_RETRY_S)
        contact.greet_at = now + contact.retry_s
        self._away(contact, now, why)

    def due(self, now: float) -> list[str]:
        """The addresses to greet now. Members whose grace has passed are forgotten."""
        for contact in list(self._contacts.values()):
            gone = not contact.present and now - contact.since >= self.grace_s
            if gone and not contact.refused:
                contact.greeting = None
            if gone and not contact.listed:
                del self._contacts[contact.address]
        return [each.address for each in self._contacts.values() if each.listed and each.greet_at <= now]

    def next_deadline(self) -> float:
        """When `due` may have something new, in seconds; inf for never."""
        greet = (each.greet_at for each in self._contacts.values() if each.listed)
        grace = (each.since + self.grace_s for each in self._contacts.values() if not each.present and each.greeting)
        return min((*greet, *grace), default=math.inf)

    @property
    def settled(self) -> bool:
        """The membership has given its list, and each address has answered or failed once."""
        return self._listed_once and all(each.tried for each in self._contacts.values() if each.listed)

    def view(self) -> View:
        """The members among which extents are placed, this node included."""
        members = {self.me.name: self.me}
        away = set()
        for contact in self._others():
            assert contact.greeting is not None, "a member without a name"
            greeting = contact.greeting
            members[greeting.name] = Member(greeting.name, greeting.weight_bytes, greeting.zone)
            if not contact.present:
                away.add(greeting.name)
        ordered = tuple(sorted(members.values(), key=lambda each: each.name))
        return View(self.me.name, ordered, frozenset(away), self.by_zone)

    def address_of(self, name: str) -> str:
        """The address of a member that is present; "" for others."""
        found = (each for each in self._others() if each.greeting and each.greeting.name == name and each.present)
        return next((each.address for each in found), "")

    def members(self, now: float) -> list[MemberRow]:
        """All addresses and their members, for people."""
        return [self._row(each, now) for each in sorted(self._contacts.values(), key=lambda each: each.address)]

    def _row(self, contact: _Contact, now: float) -> MemberRow:
        greeting = contact.greeting or Greeting("", "", 0, 0)
        state: State = "refused" if contact.refused else "present" if contact.present else "away"
        return MemberRow(
            name=greeting.name,
            address=contact.address,
            zone=greeting.zone,
            version=greeting.version,
            weight_bytes=greeting.weight_bytes,
            extents=greeting.extents,
            state=state,
            since_s=now - contact.since,
            why=contact.why,
        )

    def _others(self) -> list[_Contact]:
        """The contacts that are other members, one for each name."""
        return [
            each
            for each in self._contacts.values()
            if each.greeting and not each.refused and each.greeting.instance != self.instance
        ]

    def _away(self, contact: _Contact, now: float, why: str) -> None:
        if contact.answers:
            contact.since = now
        contact.answers, contact.why = False, why

    def _refusal(self, contact: _Contact, greeting: Greeting) -> str:
        """The reason why a node is no member; "" for a member."""
        if greeting.instance == self.instance:
            return ""
        if greeting.protocol < OLDEST_PROTOCOL:
            return f"it speaks protocol {greeting.protocol}, and {OLDEST_PROTOCOL} is the oldest: update it"
        if greeting.name == self.me.name:
            return f"its name {greeting.name} is this node's: give --node-name"
        for other in self._others():
            same = other.greeting is not None and other.greeting.name == greeting.name
            if same and other is not contact and other.present:
                return f"its name {greeting.name} is that of the node at {other.address}: give --node-name"
        return ""
