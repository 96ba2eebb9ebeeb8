"""A thread that watches a membership, as a daemon has one."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable

from cachesvc.cluster.polled import Membership
from cachesvc.core.placement.roster import Endpoint
from testbed import WAIT_S


class Watching:
    """Watches until the end of its context, whose exit fails unless `watch` ends. `without` are addresses left out."""

    def __init__(self, membership: Membership, without: Iterable[str] = ()) -> None:
        self._membership = membership
        self._without = set(without)
        self._told: queue.Queue[frozenset[Endpoint]] = queue.Queue()
        self._thread = threading.Thread(target=membership.watch, args=(self._told.put,), name="membership")

    def __enter__(self) -> Watching:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._membership.close()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive(), "`watch` did not end"

    @property
    def told(self) -> int:
        """The number of lists that no `until` has taken."""
        return self._told.qsize()

    def next(self) -> frozenset[Endpoint]:
        return self._told.get(timeout=WAIT_S)

    def until(self, wanted: Iterable[str]) -> frozenset[Endpoint]:
        """Take lists until one has exactly these addresses; return that list."""
        want = set(wanted)
        while True:
            found = self.next()
            if {each.address for each in found} - self._without == want:
                return found
