"""Copies that were filled without some of their objects: the holes that their grants name, and when to fill them again."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass

from cachesvc.core.model import ExtentId, TierName

REFILL_S = 60.0
"""Opening a dataset fills its copies with holes again, at most this often, since all ranks of a job open it at once."""


@dataclass(frozen=True, slots=True)
class CopyHoles:
    """The holes of a copy in the format of grants, "" for none, and the error code and message of the first."""

    ranges: str = ""
    code: int = 0
    message: str = ""


class HoleRecords:
    """CopyHoles by copy, as of the last fill of an extent into a tier; meaningless once that copy is evicted."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._records: dict[tuple[ExtentId, TierName], tuple[CopyHoles, float]] = {}

    def filled(self, extent: ExtentId, tier: TierName, holes: CopyHoles) -> None:
        """Record a successful fill."""
        self._records.pop((extent, tier), None)
        if holes.ranges:
            self._records[(extent, tier)] = holes, self._clock()

    def of(self, extent: ExtentId, tier: TierName) -> CopyHoles:
        """The holes of a copy, perhaps none."""
        found = self._records.get((extent, tier))
        return found[0] if found else CopyHoles()

    def due(self, extents: Container[ExtentId]) -> list[tuple[ExtentId, TierName]]:
        """Copies of these extents that have holes and were filled at least `REFILL_S` ago."""
        before = self._clock() - REFILL_S
        return [key for key, (_, since) in self._records.items() if key[0] in extents and since <= before]

    def renewed(self, tier: TierName) -> None:
        """Drop the records of a tier that has another directory now."""
        self._records = {key: found for key, found in self._records.items() if key[1] != tier}

    def evicted(self, extent: ExtentId, tier: TierName) -> None:
        """Drop the record of an evicted copy."""
        self._records.pop((extent, tier), None)
