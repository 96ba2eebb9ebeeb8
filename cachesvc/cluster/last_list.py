"""The last list of members that a source gave, which holds while the source fails."""

from __future__ import annotations

import logging

from cachesvc.cluster.addresses import MAX_MEMBERS
from cachesvc.cluster.membership import Changed, Endpoint

log = logging.getLogger(__name__)
MAX_REASON = 200
"""Characters of a reason in the log: it may quote a line of any length."""


class LastList:
    """Tells changes of the members, and logs each outage of their source once."""

    def __init__(self, source: str, changed: Changed) -> None:
        self._source = source
        self._changed = changed
        self._members: frozenset[Endpoint] = frozenset()
        self._away = False

    def found(self, members: frozenset[Endpoint]) -> None:
        """Take the members that the source has now. No member, or more than `MAX_MEMBERS`, is a failure of the source."""
        if not members:
            return self.failed("it has no members")
        if len(members) > MAX_MEMBERS:
            return self.failed(f"it has more than {MAX_MEMBERS:,} members")
        if self._away:
            log.info("the cluster's members are known again", extra={"cluster": self._source})
        self._away = False
        if members != self._members:
            self._members = members
            self._changed(members)

    def failed(self, reason: str) -> None:
        """Keep the last list. `reason` is logged unless the last attempt failed too."""
        if not self._away:
            kept = {"cluster": self._source, "reason": reason[:MAX_REASON], "members": len(self._members)}
            log.warning("the cluster's members cannot be read; the last list holds", extra=kept)
        self._away = True
