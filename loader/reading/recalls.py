"""Releases extents that this process holds and does not need: those that the daemon recalls, and mapped ones while the
node is short of memory.

A reader keeps memory mapped and files open until their room is needed, and what it holds cannot be evicted. So the
daemon recalls extents that others need the room of, and extents whose file turned out corrupt: the reader's open file
would stay corrupt however often the daemon fills the extent again. While less than 5 % of the machine's memory is free,
readers release unused mappings once a second, so that the RAM tier can shrink; leasing one again takes some 50 us.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping

from cachesvc.client.keepalive import start_polling
from cachesvc.system.memory import Memory, of_machine

_log = logging.getLogger("cachesvc")


class Recalls:
    """Polls once a second for as long as it lives (`client/keepalive.py`)."""

    def __init__(
        self,
        recalled: Callable[[], Mapping[int, bool]],
        release_when_unused: Callable[[Collection[int]], None],
        release_unused_mappings: Callable[[], None],
        measured: Callable[[], Memory] = of_machine,
    ) -> None:
        """`recalled()` returns the extents that the daemon recalls, and whether each is corrupt. For the others see
        `Leases`. `measured()` returns the machine's memory."""
        self._recalled, self._measured = recalled, measured
        self._release_when_unused, self._release_unused_mappings = (
            release_when_unused,
            release_unused_mappings,
        )
        start_polling(self)

    def poll(self) -> None:
        """Release what the daemon recalls, and unused mappings while memory is short. See `Polled`."""
        if extents := self._recalled():
            if corrupt := sum(extents.values()):
                _log.warning(
                    "the daemon found %d corrupt extents that this process holds: they are read anew", corrupt
                )
            self._release_when_unused(extents)
        machine = self._measured()
        if machine.free_bytes < machine.spare_bytes:
            self._release_unused_mappings()
