"""Adoption of the copies that an earlier daemon filled."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable

from cachesvc.core import events
from cachesvc.core.errors import CacheError
from cachesvc.core.model import ExtentId
from cachesvc.daemon.parent.messages import CopyHeld
from cachesvc.tiers.ram import RamTier
from cachesvc.tiers.tier import Checksums

log = logging.getLogger(__name__)


def adopt_copies(tier: RamTier, budget_bytes: int, held: Iterable[tuple[CopyHeld, int]]) -> events.Recovered:
    """Adopt the copies that fit into the budget, and give up the others. Those that were filled last come first."""
    fitting: dict[ExtentId, int] = {}
    for copy, fd in held:
        try:
            if copy.size_bytes <= budget_bytes:
                tier.adopt(copy.extent, fd, Checksums(copy.size_bytes, copy.digests))
                budget_bytes -= copy.size_bytes
                fitting[copy.extent] = copy.size_bytes
                continue
        except CacheError as error:
            log.warning("a copy is not adopted", extra={"extent": copy.extent.hex(), "error": str(error)})
        os.close(fd)
        tier.give_up(copy.extent)
    if fitting:
        log.info("adopted copies in RAM", extra={"extents": len(fitting), "bytes": sum(fitting.values())})
    return events.Recovered(tier.name, dict(reversed(fitting.items())))  # the core expects the oldest first
