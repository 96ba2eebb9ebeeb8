"""A tier on a disk, whose directory may be replaced while the daemon runs: removed and made anew, or mounted over.

The order of events:
  1. a probe finds that the path names another directory; the tier is lost, as for any trouble of a disk
     (a directory that cannot be opened at the start makes the tier lost from the start)
  2. the next probe locks, prepares and lists the directory that the path names now; it fails if another daemon uses it
  3. after three good probes the new directory takes the old one's place, and the tier is back
  4. when the calls of the old directory are over, its lock is released

Calls of both directories may run until 4. Each acts on the directory that it locked, wherever that is mounted by then.
"""

from __future__ import annotations

import fcntl
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cachesvc.core.errors import CacheError, OutOfSpace
from cachesvc.core.model import ExtentId, TierName
from cachesvc.tiers.mounts import check_own
from cachesvc.tiers.nvme import NvmeTier, open_nvme
from cachesvc.tiers.probe import Room, room, write_and_remove
from cachesvc.tiers.tier import translated


@dataclass(frozen=True, slots=True)
class Successor:
    """An opened directory that is to become the tier, with the sizes in bytes of its extents and the disk's room."""

    tier: NvmeTier
    extents: dict[ExtentId, int]
    room: Room


class Disk:
    """A tier on a disk, and its successor while it has one.

    `open`, `probe` and `revive` run on the disk's probing thread, the other methods on the loop's. `take` must not run
    while one of the three is under way.
    """

    def __init__(self, name: TierName, path: Path, own: bool = False) -> None:
        """Open nothing yet. `own`: the path must lie on a file system of its own."""
        self.name = name
        self.path = path.absolute()
        self.tier: NvmeTier | None = None
        """None until `take` was called for an opened directory."""
        self.directory_id: tuple[int, int] | None = None
        """Device and inode of the directory that was locked last, even if its opening failed then; None before."""
        self._own = own
        self._successor: Successor | None = None
        self._handover = threading.Lock()  # keeps `unlock` from using a lock that is being closed

    @property
    def mounted(self) -> bool | None:
        """True where a disk was mounted at the path when it was opened; None before that is known."""
        return None if self.tier is None else self.tier.directory.mounted

    def open(self, progressed: Callable[[], None] = lambda: None) -> Successor:
        """Lock, prepare and list the directory that the path names now, and keep it as the successor.

        `progressed` is called after each answer of the disk. Raises any `CacheError`.
        """
        if self._successor is not None and self._successor.tier.directory.in_place():
            return self._successor
        self._close_successor()
        if self._own:
            check_own(str(self.path))
        tier = open_nvme(self.name, self.path, mounted=self.mounted)
        self.directory_id = tier.directory.place
        try:
            extents = tier.recover(progressed)
            with suppress(OutOfSpace), translated(str(self.path), "write to the cache directory"):
                write_and_remove(tier.directory.root)
            with translated(str(self.path), "measure the room"):
                found = Successor(tier, extents, room(tier.directory.root))
        except CacheError:
            tier.close()
            raise
        with self._handover:
            self._successor = found
        return found

    def probe(self, thorough: bool, sync: bool = True) -> Room:
        """Check that the directory works; return the disk's room. Raises `TierFailed`."""
        assert self.tier is not None, "a probe of a directory that was never opened"
        return self.tier.probe(thorough, sync)

    def revive(self) -> Room:
        """Probe a lost tier; return the disk's room. Raises any `CacheError`.

        Where the path names another directory, it is opened and probed; the room is 0 until it becomes the tier.
        """
        if self.tier is not None:
            try:
                found = self.tier.probe(thorough=True)
            except CacheError:
                if self.tier.directory.in_place():
                    raise
            else:
                self._close_successor()
                return found
        self.open().tier.probe(thorough=True)
        return Room(0, 0)

    def take(self) -> Successor | None:
        """Make the successor the tier and return it; None where the directory has not changed."""
        found, self._successor = self._successor, None
        if found is not None:
            self.tier = found.tier
        return found

    def unlock(self) -> None:
        """Release all locks for another daemon, since this one is about to end but hangs in the disk."""
        with self._handover:
            for tier in (self.tier, self._successor.tier if self._successor else None):
                if tier is not None:
                    fcntl.flock(tier.directory.lock, fcntl.LOCK_UN)

    def _close_successor(self) -> None:
        with self._handover:
            found, self._successor = self._successor, None
        if found is not None:
            found.tier.close()
