"""Decides which users may use which data: checks `--allow PREFIX=uid:...,gid:...` against the kernel's credentials.

The kernel states the user of a connection to the grants socket (SO_PEERCRED, SO_PEERGROUPS); a client cannot forge it.
gRPC over a Unix socket hides the user. A control call therefore names a grants connection of its caller by that
connection's token: a random number that only the connection's owner knows, valid while the connection lives. Data that
a user may not see is reported in the same words as data that does not exist.

The longest prefix decides, as in a firewall or a web server. A user sees a dataset if it may see every one of its
objects. The daemon's own user (its builder, its operator) sees all. Root does not, because containers run as root.
"""

from __future__ import annotations

import array
import logging
import os
import re
import socket
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from cachesvc.client.caller_token import TOKEN_KEY
from cachesvc.config import Rule
from cachesvc.core.errors import NotAllowed
from cachesvc.sources.files import under
from cachesvc.sources.uri import Allowlist

log = logging.getLogger(__name__)
_SO_PEERGROUPS = 59  # not named by Python; Linux 4.13
_GROUPS_BYTES = 1024  # as much as Python asks for: 256 groups
_PATTERN = re.compile(r"[*?\[{]")
NO_USER, ANONYMOUS = -1, -2
"""Stand for a uid. NO_USER: no user, for what a restart found and what the daemon itself asks for. ANONYMOUS: all callers
without a token together."""
MAX_TOKEN_DIGITS = 20
"""The digits of a 64-bit number."""


@dataclass(frozen=True, slots=True)
class Peer:
    """The user at the other end of a Unix socket when it connected."""

    uid: int
    gids: frozenset[int]
    pid: int = field(default=0, compare=False)
    """0 for a process of another PID namespace."""


def peer_of(channel: socket.socket) -> Peer:
    """Return the user of a connected Unix socket, as the kernel states it."""
    pid, uid, gid = struct.unpack("3i", channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    groups = array.array("I")
    try:
        groups.frombytes(channel.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _GROUPS_BYTES))
    except OSError as error:  # the user is in more groups: only the primary group counts
        log.warning("a peer's groups cannot be read", extra={"peer_uid": uid, "error": error.strerror})
    return Peer(uid, frozenset((gid, *groups)), pid)


def is_own_user(peer: Peer | None) -> bool:
    """Tell whether the peer is the daemon's own user, its operator."""
    return peer is not None and peer.uid == os.geteuid()


def admits(rules: Iterable[Rule], peer: Peer | None) -> bool:
    """Tell whether every rule admits the peer. None is an unknown caller, who is admitted only where there is no rule."""
    if is_own_user(peer):
        return True
    return all(peer is not None and (peer.uid in r.uids or not peer.gids.isdisjoint(r.gids)) for r in rules)


def token_of(metadata: Iterable[tuple[str, str | bytes]]) -> int | None:
    """Return the token in a call's metadata; None where there is no valid one."""
    given = str(dict(metadata).get(TOKEN_KEY, ""))
    return int(given) if given.isdecimal() and len(given) <= MAX_TOKEN_DIGITS else None


class Tenants:
    """The allowlist with its rules. Without rules, every user who may connect may use all of it."""

    def __init__(self, allowed: Allowlist, rules: Sequence[Rule]) -> None:
        self.replace(allowed, rules)

    def replace(self, allowed: Allowlist, rules: Sequence[Rule]) -> None:
        """Take another allowlist with its rules, for calls from now on."""
        found: dict[str, Rule] = {}
        for rule in rules:
            prefix = allowed.canonical_prefix(rule.prefix)
            before = found.get(prefix, Rule(prefix, (), ()))
            found[prefix] = Rule(prefix, before.uids + rule.uids, before.gids + rule.gids)
        self._allowlist, self._rules = allowed, found

    def allows(self, uri: str) -> bool:
        """Tell whether an object lies below an allowed prefix, whoever asks. Raises what the allowlist raises."""
        return self._allowlist.allows(uri)

    def check(self, uri: str, peer: Peer | None) -> str:
        """Return the canonical URI. Raises NotAllowed, which names only prefixes that the peer may use, and the other
        errors of `Allowlist.check`."""
        if not self._rules:
            return self._allowlist.check(uri)
        try:
            found = self._allowlist.check(uri)
        except NotAllowed:
            found = ""
        if found and admits(self._rules_below(found), peer):
            return found
        raise NotAllowed(
            f"{uri} is not below a prefix that you may use ({', '.join(self.prefixes(peer)) or 'none'})"
        )

    @property
    def allowed(self) -> tuple[str, ...]:
        """All allowed prefixes; none where all is allowed that the daemon's user may read. Digests stand for prefixes of
        some users alone: other nodes compare them, and any user may see them."""
        open_to_all = self.prefixes(None)
        return tuple(
            each if each in open_to_all else f"restricted-{blake2b(each.encode(), digest_size=4).hexdigest()}"
            for each in self._allowlist.prefixes or ()
        )

    def may_read(self, uri: str, peer: Peer | None) -> bool:
        """Tell whether the peer may read an object. Its key may hold anything but dot segments, which a server may
        resolve."""
        if not {".", ".."}.isdisjoint(uri.split("/")):
            return False
        return self._allowlist.allows(uri) and admits(self._rules_above(uri), peer)

    def prefixes(self, peer: Peer | None) -> list[str]:
        """Return the allowed prefixes that the peer may use."""
        return [each for each in self._allowlist.prefixes or () if admits(self._rules_above(each), peer)]

    def rules_of(self, folder: str, objects: Iterable[str]) -> frozenset[Rule]:
        """Return the rules of a dataset's objects, which all lie below `folder`; a user must meet every rule. Objects in
        storages of several kinds have no common folder: `folder` is then below no prefix."""
        if not self._rules:
            return frozenset()
        folder, prefixes = folder.rstrip("/"), self._allowlist.prefixes or ()
        if not under(folder, prefixes) or any(under(each, (folder,)) for each in prefixes if each != folder):
            return frozenset(rule for uri in objects for rule in self._rules_above(uri))
        return frozenset(self._rules_above(folder))

    def _rules_above(self, uri: str) -> tuple[Rule, ...]:
        """Return the rule of the longest allowed prefix of a URI, if it has one."""
        above = [each for each in self._allowlist.prefixes or () if under(uri, (each,))]
        rule = self._rules.get(max(above, key=len, default=""))
        return () if rule is None else (rule,)

    def _rules_below(self, uri: str) -> list[Rule]:
        """Return every rule of data that a listing of the URI may include. A pattern counts as its
        longest folder without wildcards."""
        pattern = _PATTERN.search(uri)
        head = uri[: uri.rindex("/", 0, pattern.start())] if pattern else uri.rstrip("/")
        below = [rule for prefix, rule in self._rules.items() if under(prefix, (head,))]
        return [*self._rules_above(head), *below]
