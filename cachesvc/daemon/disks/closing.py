"""The end of the tiers: what their threads are doing is finished, what they were to do next is not. No disk is waited for
longer than `CLOSE_S`: of one that does not answer, what others need is given back."""

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
"""How long the end waits for all disks: what is being committed, no more."""
ENDS_S = 0.1
"""A thread that waits for no disk ends in a millisecond."""


def close_tier(tier: Tier, calls: Sequence[Lane], deadline: float) -> bool:
    """Close a tier once the calls under way are over; False when that takes too long."""

    def close() -> None:
        try:
            tier.close()
        except CacheError as error:
            log.warning("a tier did not close cleanly", extra={"tier": tier.name, "error": str(error)})

    return all(lane.close(_left_s(deadline)) for lane in calls) and _in_time(close, _left_s(deadline))


def abandon(disk: Disk) -> bool:
    """Let another daemon have a disk's directory; False when even that takes too long."""
    log.warning("a tier that does not answer is left as it is", extra={"tier": disk.name})
    return _in_time(disk.unlock, ENDS_S)


def all_ended(lanes: Iterable[Lane]) -> bool:
    """Whether all threads end, which were told to."""
    return all([lane.close(ENDS_S) for lane in lanes])


def _left_s(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


def _in_time(work: Callable[[], None], wait_s: float) -> bool:
    """Whether a call ends within that time, on a thread of its own; one that does not is left behind."""
    thread = threading.Thread(target=work, name="in-time", daemon=True)
    thread.start()
    thread.join(wait_s)
    return not thread.is_alive()
