"""A tier on a disk, whose directory may come late, and may become another one while the daemon runs: it was removed
and made anew, or another disk was mounted over it.

The order of events:
  1. a probe finds that the path names another directory      the tier is given up, as for any trouble of a disk
     (one that could not be opened at the start is lost from there on)
  2. the next one locks what the path names, lays it out and lists it; one used by another daemon stays out
  3. three good probes of that                                it takes the old one's place, and the tier is back
  4. the calls that the old one still had are over            its lock is given back

Until 4 calls of either go where they belong: each acts on the directory that it locked, wherever that is by now.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cachesvc.core.errors import CacheError, OutOfSpace
from cachesvc.core.model import ExtentId, TierName
from cachesvc.tiers.nvme import NvmeTier, open_nvme
from cachesvc.tiers.os_errors import translated
from cachesvc.tiers.probe import Room, room, write_and_remove


@dataclass(frozen=True, slots=True)
class Successor:
    """What is to take a tier's place; at the start, that of none."""

    tier: NvmeTier
    extents: dict[ExtentId, int]
    room: Room


class Disk:
    """A tier on a disk, and its successor while it has one. `open`, `probe` and `revive` are called by one thread, the
    others by the loop's; `take` while none of those is under way."""

    def __init__(
        self, name: TierName, path: Path, locks: Sequence[int] = (), mounted: bool | None = None
    ) -> None:
        """Nothing is opened yet. `locks`, which are ours to close, and `mounted` are what another daemon told of the
        directory."""
        self.name = name
        self.path = path.absolute()
        self.tier: NvmeTier | None = None
        """None until a directory was opened and taken."""
        self.place: tuple[int, int] | None = None
        """Which directory was locked last, whatever came of it; None before the first."""
        self._told_mounted = mounted
        self._told_locks = list(locks)
        self._next: Successor | None = None
        self._handover = threading.Lock()  # `locks` against a lock that is given back

    @property
    def mounted(self) -> bool | None:
        """Whether a disk of its own is mounted there, or was; None where nobody knows yet."""
        return self._told_mounted if self.tier is None else self.tier.directory.mounted

    def open(self, heard: Callable[[], None] = lambda: None) -> Successor:
        """The directory that the path names now, locked, laid out and listed. `heard` is called each time that the disk
        has answered. Raises any `CacheError`."""
        if self._next is not None and self._next.tier.directory.in_place():
            return self._next
        self._give_up()
        tier = open_nvme(self.name, self.path, locks=self._told_locks, mounted=self.mounted)
        self.place = tier.directory.place
        try:
            extents = tier.recover(heard)
            with suppress(OutOfSpace), translated(str(self.path), "write to the cache directory"):
                write_and_remove(tier.directory.root)
            with translated(str(self.path), "measure the room"):
                found = Successor(tier, extents, room(tier.directory.root))
        except CacheError:
            tier.close()
            raise
        with self._handover:
            self._next, told, self._told_locks = found, self._told_locks, []
        for fd in told:
            os.close(fd)
        return found

    def probe(self, thorough: bool, sync: bool = True) -> Room:
        """Whether the directory works, and its room. Raises `TierFailed`."""
        assert self.tier is not None, "a probe of what was never opened"
        return self.tier.probe(thorough, sync)

    def revive(self) -> Room:
        """The probe of a tier that was given up: of the directory that its path names now, which is opened first
        where it is another one (its room is told of when it takes its place). Raises any `CacheError`."""
        if self.tier is not None:
            try:
                found = self.tier.probe(thorough=True)
            except CacheError:
                if self.tier.directory.in_place():
                    raise
            else:
                self._give_up()
                return found
        self.open().tier.probe(thorough=True)
        return Room(0, 0)

    def take(self) -> Successor | None:
        """The successor, which is the tier from here on; None where the directory is the one that it was."""
        found, self._next = self._next, None
        if found is not None:
            self.tier = found.tier
        return found

    def locks(self) -> list[int]:
        """New descriptors of all locks that are held for the tier, also while it is being opened."""
        with self._handover:
            tiers = [self.tier, self._next.tier if self._next else None]
            held = [tier.directory.lock for tier in tiers if tier is not None]
            return [os.dup(fd) for fd in (*held, *self._told_locks)]

    def unlock(self) -> None:
        """Give back all locks, for another daemon: this one is about to end, and hangs in the disk."""
        for fd in self.locks():
            fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)

    def _give_up(self) -> None:
        with self._handover:
            found, self._next = self._next, None
        if found is not None:
            found.tier.close()
