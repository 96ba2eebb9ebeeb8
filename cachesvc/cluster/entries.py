"""The entries that members write about themselves in a key-value store: one JSON object for each."""

from __future__ import annotations

import json
import logging

from cachesvc.cluster.addresses import split_address
from cachesvc.cluster.membership import Endpoint, Registration

log = logging.getLogger(__name__)
VERSION = 1
"""Later versions may add fields to an entry; they change none."""


def encode(me: Registration) -> bytes:
    """Return the entry of a member."""
    entry = {"address": me.address, "name": me.name, "zone": me.zone, "version": VERSION}
    return json.dumps(entry).encode()


def decode(value: bytes) -> Endpoint:
    """Return the member that an entry describes. Raises ValueError."""
    try:
        entry = json.loads(value)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(entry, dict) or not isinstance(entry.get("version"), int):
        raise ValueError("it is no object with a version")
    address, name, zone = (entry.get(key) for key in ("address", "name", "zone"))
    if not isinstance(address, str) or not isinstance(name, str) or not isinstance(zone, str) or not name:
        raise ValueError("it has no address, name and zone")
    split_address(address)
    return Endpoint(address, name, zone)


class Entries:
    """Members by key. After an outage the members that were known before have `grace_s` seconds to register again."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._present: dict[str, Endpoint] = {}
        self._awaited: dict[str, Endpoint] = {}
        self._awaited_until = 0.0

    def await_again(self, now: float) -> None:
        """Note the end of an outage at `now`, in seconds of any clock."""
        self._awaited = self._awaited | self._present
        self._awaited_until = now + self._grace_s

    def list(self, found: dict[str, bytes]) -> None:
        """Take all entries as they are now."""
        self._present = {}
        for key, value in found.items():
            self.put(key, value)

    def put(self, key: str, value: bytes) -> None:
        """Take a new or changed entry. An entry that is not understood is logged and left out."""
        try:
            self._present[key] = decode(value)
        except ValueError as error:
            self._present.pop(key, None)
            log.warning("an entry of the cluster is not understood", extra={"key": key, "reason": str(error)})

    def delete(self, key: str) -> None:
        """Drop an entry that its member removed, or whose lease ended."""
        self._present.pop(key, None)
        self._awaited.pop(key, None)

    def get(self, key: str) -> Endpoint | None:
        """Return the present entry of a key."""
        return self._present.get(key)

    def members(self, now: float) -> frozenset[Endpoint]:
        """Return the present members, and until the end of the grace time the awaited ones."""
        if now >= self._awaited_until:
            self._awaited = {}
        return frozenset((self._awaited | self._present).values())
