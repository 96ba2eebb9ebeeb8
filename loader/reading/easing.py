"""The node's memory runs short: what this process holds of the RAM tier goes back, so that the tier can shrink.

A reader maps what it reads for as long as nobody needs the room, and what is mapped cannot be evicted. While less than
5 % of the machine's memory is free, readers give back once a second what no read looks at; what they read then they lease
anew, for some 50 us an extent.
"""

from __future__ import annotations

from collections.abc import Callable

from cachesvc.client.keepalive import look_after
from cachesvc.system.memory import Memory, of_machine


class Easing:
    """Looks once a second, for as long as it lives (`client/keepalive.py`)."""

    def __init__(self, give_back: Callable[[], None], measured: Callable[[], Memory] = of_machine) -> None:
        """`give_back()` ends the leases of what nobody looks at."""
        self._give_back, self._measured = give_back, measured
        look_after(self)

    def look(self) -> None:
        """See `presence.LookedAfter`."""
        machine = self._measured()
        if machine.free_bytes < machine.spare_bytes:
            self._give_back()
