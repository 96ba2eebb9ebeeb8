"""Who may use which data: `--allow PREFIX=uid:...,gid:...`, held against what the kernel says of the peer.

A connection to the grants socket carries its user's identity (SO_PEERCRED, SO_PEERGROUPS), which nobody can
choose. gRPC over a Unix socket hides it, so a call names a grants connection of its caller by that
connection's token: a random number that only its owner was told, and that is worth nothing once the
connection has ended. What may not be seen looks like what is not there.

The longest prefix decides, as in a firewall or a web server. A dataset is seen by those who may see every one
of its objects. The daemon's own user (its builder, its operator) sees all; root does not, because that is
what containers run as.
"""

from __future__ import annotations

import array
import logging
import os
import re
import socket
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cachesvc.client.caller_token import TOKEN_KEY
from cachesvc.config import Rule
from cachesvc.core.errors import NotAllowed
from cachesvc.sources.files import under
from cachesvc.sources.uri import Allowlist

log = logging.getLogger(__name__)
_SO_PEERGROUPS = 59  # not named by Python; Linux 4.13
_GROUPS_BYTES = 1024  # as much as Python asks for: 256 groups
_PATTERN = re.compile(r"[*?\[{]")
NOBODY, STRANGER = -1, -2
"""Where a user is told by a uid: no user (what a restart found, what the daemon itself asks for), and whoever calls
without a token, all of them together."""
MAX_TOKEN_DIGITS = 20
"""Of a number of 64 bits."""


@dataclass(frozen=True, slots=True)
class Peer:
    """The user behind a Unix socket, as of the moment it connected."""

    uid: int
    gids: frozenset[int]


def peer_of(channel: socket.socket) -> Peer:
    """Whom the kernel vouches for."""
    _, uid, gid = struct.unpack("3i", channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    groups = array.array("I")
    try:
        groups.frombytes(channel.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _GROUPS_BYTES))
    except OSError as error:  # in more groups than that: only the first counts
        log.warning("a peer's groups cannot be read", extra={"peer_uid": uid, "error": error.strerror})
    return Peer(uid, frozenset((gid, *groups)))


def admits(rules: Iterable[Rule], peer: Peer | None) -> bool:
    """Whether every rule lets the peer in. None is somebody unknown: only what has no rule is theirs."""
    if peer is not None and peer.uid == os.geteuid():
        return True
    return all(peer is not None and (peer.uid in r.uids or not peer.gids.isdisjoint(r.gids)) for r in rules)


def token_of(metadata: Iterable[tuple[str, str | bytes]]) -> int | None:
    """The token in a call's metadata, whatever else a caller may have put there."""
    given = str(dict(metadata).get(TOKEN_KEY, ""))
    return int(given) if given.isdecimal() and len(given) <= MAX_TOKEN_DIGITS else None


class Tenants:
    """The allowlist with its rules; without any rule, everybody who may connect may use all of it."""

    def __init__(self, allowed: Allowlist, rules: Sequence[Rule]) -> None:
        self._allowlist = allowed
        self._rules: dict[str, Rule] = {}
        for rule in rules:
            prefix = allowed.canonical_prefix(rule.prefix)
            before = self._rules.get(prefix, Rule(prefix, (), ()))
            self._rules[prefix] = Rule(prefix, before.uids + rule.uids, before.gids + rule.gids)

    def check(self, uri: str, peer: Peer | None) -> str:
        """The canonical URI. Raises NotAllowed, which names only what the peer may use, and what else
        `Allowlist.check` raises."""
        if not self._rules:
            return self._allowlist.check(uri)
        try:
            found = self._allowlist.check(uri)
        except NotAllowed:
            found = ""
        if found and admits(self._met_below(found), peer):
            return found
        raise NotAllowed(
            f"{uri} is not below a prefix that you may use ({', '.join(self.prefixes(peer)) or 'none'})"
        )

    def prefixes(self, peer: Peer | None) -> list[str]:
        """The allowed prefixes that the peer may use."""
        return [each for each in self._allowlist.prefixes or () if admits(self._over(each), peer)]

    def rules_of(self, folder: str, objects: Iterable[str]) -> frozenset[Rule]:
        """The rules over a dataset's objects, all of which lie below `folder`; all of them must be met. What lies in
        storages of several kinds has no folder in common: then that is below no prefix."""
        if not self._rules:
            return frozenset()
        folder, prefixes = folder.rstrip("/"), self._allowlist.prefixes or ()
        if not under(folder, prefixes) or any(under(each, (folder,)) for each in prefixes if each != folder):
            return frozenset(rule for uri in objects for rule in self._over(uri))
        return frozenset(self._over(folder))

    def _over(self, uri: str) -> tuple[Rule, ...]:
        """The rule of the longest allowed prefix, if it has one."""
        above = [each for each in self._allowlist.prefixes or () if under(uri, (each,))]
        rule = self._rules.get(max(above, key=len, default=""))
        return () if rule is None else (rule,)

    def _met_below(self, uri: str) -> list[Rule]:
        """Every rule that a listing of the URI may meet; a pattern counts as the folder that it starts from."""
        pattern = _PATTERN.search(uri)
        head = uri[: uri.rindex("/", 0, pattern.start())] if pattern else uri.rstrip("/")
        below = [rule for prefix, rule in self._rules.items() if under(prefix, (head,))]
        return [*self._over(head), *below]
