"""Copies that were filled without some of their objects: what their grants say of it, when the source is asked again."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass

from cachesvc.core.model import ExtentId, TierName

AGAIN_S = 60.0
"""Opening a dataset asks the source again for missing objects, but only this long after the last time, since all ranks of
a job open it at once."""


@dataclass(frozen=True, slots=True)
class Lack:
    """The holes of a copy as grants name them, and the code and message of the first."""

    holes: str = ""
    code: int = 0
    message: str = ""


class Lacking:
    """Keyed by copy, from the last fill of that extent into that tier; stale once that copy is gone."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._found: dict[tuple[ExtentId, TierName], tuple[Lack, float]] = {}

    def filled(self, extent: ExtentId, tier: TierName, lack: Lack) -> None:
        """A fill has ended well."""
        self._found.pop((extent, tier), None)
        if lack.holes:
            self._found[(extent, tier)] = lack, self._clock()

    def of(self, extent: ExtentId, tier: TierName) -> Lack:
        """The holes of a copy, which may be none."""
        found = self._found.get((extent, tier))
        return found[0] if found else Lack()

    def due(self, extents: Container[ExtentId]) -> list[tuple[ExtentId, TierName]]:
        """Copies of these that somebody may have the source asked again for."""
        before = self._clock() - AGAIN_S
        return [key for key, (_, since) in self._found.items() if key[0] in extents and since <= before]

    def renewed(self, tier: TierName) -> None:
        """The tier has another directory, and with it other copies."""
        self._found = {key: found for key, found in self._found.items() if key[1] != tier}

    def evicted(self, extent: ExtentId, tier: TierName) -> None:
        """The copy is gone."""
        self._found.pop((extent, tier), None)
