"""The end of the tiers: calls under way finish, queued ones are dropped, and no disk delays the end by more than `CLOSE_S`.

A disk that does not answer is abandoned: its locks are released for the next daemon.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from cachesvc.core.errors import CacheError
from cachesvc.daemon.disks.renewal import Disk
from cachesvc.daemon.loop.lanes import Lane
from cachesvc.tiers.tier import Tier

log = logging.getLogger(__name__)
CLOSE_S = 5.0
"""The wait for all disks together, enough for the commits under way."""
ENDS_S = 0.1
"""The wait for threads that no disk blocks; they end within a millisecond."""


def close_tier(tier: Tier, calls: Sequence[Lane], deadline: float) -> bool:
    """Close a tier once the calls under way are over; False where that takes until the deadline."""

    def close() -> None:
        try:
            tier.close()
        except CacheError as error:
            log.warning("a tier did not close cleanly", extra={"tier": tier.name, "error": str(error)})

    return all(lane.close(_left_s(deadline)) for lane in calls) and _in_time(close, _left_s(deadline))


def abandon(disk: Disk) -> bool:
    """Release a disk's directory for another daemon; False where even that takes too long."""
    log.warning("a tier that does not answer is abandoned", extra={"tier": disk.name})
    return _in_time(disk.unlock, ENDS_S)


def all_ended(lanes: Iterable[Lane]) -> bool:
    """Tell whether all threads have ended, which were told to end before."""
    return all([lane.close(ENDS_S) for lane in lanes])


def _left_s(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


def _in_time(work: Callable[[], None], wait_s: float) -> bool:
    """Run a call on a new daemon thread and tell whether it ends within `wait_s`; otherwise it is left running."""
    thread = threading.Thread(target=work, name="in-time", daemon=True)
    thread.start()
    thread.join(wait_s)
    return not thread.is_alive()
