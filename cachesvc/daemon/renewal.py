"""A cache directory that was removed and made anew, or over which another disk was mounted: taken up while the
daemon runs.

The order of events:
  1. a probe finds that the path names another directory      the tier is given up, as for any trouble of a disk
  2. the next one locks what the path names, lays it out and lists it; one used by another daemon stays out
  3. three good probes of that                                it takes the old one's place, and the tier is back
  4. the calls that the old one still had are over            its lock is given back

Until 4 calls of either go where they belong: each acts on the directory that it locked, wherever that is by now.
"""

from __future__ import annotations

from dataclasses import dataclass

from cachesvc.core.errors import CacheError
from cachesvc.core.model import ExtentId
from cachesvc.tiers.nvme import NvmeTier
from cachesvc.tiers.probe import Room


@dataclass(slots=True)
class Successor:
    """What is to take a tier's place."""

    tier: NvmeTier
    extents: dict[ExtentId, int]
    room: Room


class Disk:
    """A tier on a disk, and its successor while it has one. The first two are called by one thread, the others by
    the loop's while no probe is under way."""

    def __init__(self, tier: NvmeTier) -> None:
        self.name = tier.name
        self.tier = tier
        self._next: Successor | None = None

    def probe(self, thorough: bool, sync: bool = True) -> Room:
        """Whether the directory works, and its room. Raises `TierFailed`."""
        return self.tier.probe(thorough, sync)

    def revive(self) -> Room:
        """The probe of a tier that was given up: of the directory that its path names now, which is locked first
        where it is another one (its room is told of when it takes its place). Raises any `CacheError`."""
        try:
            room = self.tier.probe(thorough=True)
        except CacheError:
            if self.tier.directory.here():
                raise
            found = self._successor()
            found.room = found.tier.probe(thorough=True)
            return Room(0, 0)
        self._give_up()
        return room

    def take(self) -> Successor | None:
        """The successor, which is the tier from here on; None where the directory is the one that it was."""
        found, self._next = self._next, None
        if found is not None:
            self.tier = found.tier
        return found

    def _successor(self) -> Successor:
        if self._next is not None and self._next.tier.directory.here():
            return self._next
        self._give_up()
        tier = self.tier.anew()
        try:
            self._next = Successor(tier, tier.recover(), Room(0, 0))
        except CacheError:
            tier.close()
            raise
        return self._next

    def _give_up(self) -> None:
        if self._next is not None:
            self._next.tier.close()
        self._next = None
