"""What a tier may hold: its share, but never the room that other people's files, or trainers' memory, take."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from cachesvc.config import NvmeSpec
from cachesvc.core.errors import OutOfSpace
from cachesvc.core.model import TierName
from cachesvc.core.records.tier_state import TierState
from cachesvc.daemon.fills.memory_admission import Work
from cachesvc.system.memory import Memory
from cachesvc.tiers.probe import Room

SHARE_SPARE = 0.05
"""Left free on a disk that is given by share: a full disk is everybody's problem."""
SIZE_SPARE = 0.01
"""Left free on a disk of which bytes were given: who gave them has done the sum, but others may write too."""
STEADY = 3
"""Measurements that must agree before a budget shrinks: file systems give back what was removed a little late,
and shrinking for that would remove more."""


def budget_bytes(spec: NvmeSpec, room: Room, ours_bytes: int) -> int:
    """A directory's budget: as given, but never what others use of the disk nor the last of its room; what the
    cache itself holds there (`ours_bytes`) is its own to keep."""
    spare = int(room.total_bytes * (SIZE_SPARE if spec.size_bytes else SHARE_SPARE))
    wanted = spec.size_bytes or int(room.total_bytes * spec.share)
    return max(0, min(wanted, room.free_bytes + ours_bytes - spare))


def checked_budget(spec: NvmeSpec, room: Room, ours_bytes: int, extent_bytes: int) -> int:
    """The budget that a daemon starts with. Raises OutOfSpace where it holds no extent, and nothing lies there."""
    budget = budget_bytes(spec, room, ours_bytes)
    if budget < extent_bytes and not ours_bytes:
        raise OutOfSpace(
            f"{spec.path} has room for {budget:,} bytes, less than one extent of {extent_bytes:,}; free room there,"
            " or give --nvme another directory"
        )
    return budget


class Budgets:
    """The budgets of the tiers as disks and memory fill and empty, and of fills."""

    def __init__(
        self, specs: Mapping[TierName, NvmeSpec], extent_bytes: int, work_bytes: int, room_bytes: int
    ) -> None:
        """Fills may take `work_bytes` of memory in any case, and with the RAM tier together `room_bytes`."""
        self._specs, self._extent_bytes = specs, extent_bytes
        self._work_bytes, self._room_bytes = work_bytes, room_bytes
        self._last: dict[TierName, deque[int]] = {name: deque(maxlen=STEADY) for name in specs}

    def of_ram(self, given_bytes: int) -> RamBudget:
        """That of the RAM tier, which is given so much at most."""
        return RamBudget(given_bytes, LEAST_EXTENTS * self._extent_bytes)

    def of_fills(self, ram: TierState | None) -> Work:
        """That of fills, beside the RAM tier."""
        return Work(self._work_bytes, self._room_bytes, ram)

    def renewed(self, tier: TierName) -> None:
        """A tier has another disk: what was measured before is of the old one."""
        self._last[tier].clear()

    def measured(self, tier: TierName, room: Room, ours_bytes: int) -> int:
        """The budget now, in bytes, given the disk's room and what the cache holds of it."""
        last = self._last[tier]
        last.append(budget_bytes(self._specs[tier], room, ours_bytes))
        return max(last)


LEAST_EXTENTS = 4
"""Stay in RAM while memory is short, but no more than half of what is to be left free: with room for none, reads that
cannot go elsewhere would stop until a trainer has written its checkpoint, and a minute longer."""
MEASURE_EVERY_S = 1.0
CALM_S = 60.0
"""The RAM tier takes memory back when it has been free for so long: what a trainer uses comes and goes."""


class RamBudget:
    """The RAM tier's budget as the memory around it fills and empties."""

    def __init__(self, given_bytes: int, least_bytes: int) -> None:
        """`given_bytes`: the most that it may ever be; `least_bytes`: what it keeps, see `LEAST_EXTENTS`."""
        self._given_bytes, self._least_bytes = given_bytes, min(given_bytes, least_bytes)
        self._low: deque[tuple[float, int]] = deque()

    def measured(self, memories: Sequence[Memory], ours_bytes: int, work_bytes: int, now: float) -> int:
        """The budget now, in bytes, of a tier that takes `ours_bytes`, beside fills that will take `work_bytes`: the least
        of the last `CALM_S`."""
        rooms = (one.free_bytes + ours_bytes - work_bytes - one.spare_bytes for one in memories)
        least = min(self._least_bytes, *(one.spare_bytes // 2 for one in memories))
        found = max(least, min(self._given_bytes, *rooms))
        low = self._low  # budgets that may be the least: later ones are larger
        while low and low[-1][1] >= found:
            low.pop()
        low.append((now, found))
        while low[0][0] < now - CALM_S:
            low.popleft()
        return low[0][1]
