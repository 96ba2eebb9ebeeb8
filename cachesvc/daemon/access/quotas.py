"""Which quota a claim falls under: by where its data lies, and by the user who reads it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cachesvc.config import USER, QuotaSpec
from cachesvc.core.errors import InvalidInput
from cachesvc.daemon.access.tenants import STRANGER
from cachesvc.sources.files import under
from cachesvc.sources.uri import canonical


class Quotas:
    """What `--quota` said."""

    def __init__(self, specs: Sequence[QuotaSpec], place: Callable[[str], str] = canonical) -> None:
        """`place`: where a prefix leads, as a catalog names it. Raises InvalidInput for a prefix that is none, and for two
        quotas of one name."""
        self._users: dict[str, int] = {}
        self._prefixes: dict[str, int] = {}
        for spec in specs:
            of_user = spec.of.partition(":")[0] == USER
            given = self._users if of_user else self._prefixes
            name = spec.of if of_user else place(spec.of).rstrip("/")
            if name in given:
                raise InvalidInput(f"--quota names {spec.of} more than once; give it one size")
            given[name] = spec.size_bytes

    def of_dataset(self, uri_prefix: str) -> int | None:
        """Bytes that one dataset below a prefix may keep: the longest prefix's; None without one."""
        below = [prefix for prefix in self._prefixes if under(uri_prefix, (prefix,))]
        return self._prefixes[max(below, key=len)] if below else None

    def of_user(self, uid: int) -> int | None:
        """Bytes that the datasets of one user may keep together; None without a quota, or without a user. A stranger may
        be any of them, so all strangers together have the least that any user has."""
        if uid == STRANGER:
            return min(self._users.values(), default=None)
        if uid < 0:
            return None
        return self._users.get(f"{USER}:{uid}", self._users.get(USER))
