"""What the daemon asks for goes back.

A reader keeps memory mapped and files open for as long as nobody needs the room: then another job would never get its
share. And a file whose bytes rotted, or never reached the disk, stays what it is however often the daemon fills the extent
again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping

from cachesvc.client.keepalive import look_after

_log = logging.getLogger("cachesvc")


class Recalls:
    """Looks once a second, for as long as it lives (`client/keepalive.py`)."""

    def __init__(
        self, recalled: Callable[[], Mapping[int, bool]], forgo: Callable[[Collection[int]], None]
    ) -> None:
        """`recalled()` tells extents, and which are wrong; `forgo(extents)` ends their leases as soon as no read looks at
        them."""
        self._recalled, self._forgo = recalled, forgo
        look_after(self)

    def look(self) -> None:
        """See `presence.LookedAfter`."""
        if extents := self._recalled():
            if wrong := sum(extents.values()):
                _log.warning("the daemon found %d extents wrong that this process reads: read anew", wrong)
            self._forgo(extents)
