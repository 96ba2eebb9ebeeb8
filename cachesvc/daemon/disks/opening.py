"""The cache directories at the start: opened side by side, each on the thread that goes on to probe it.

What the operator has to mend (a path that is none, a directory of another daemon's, no room) keeps the daemon from
starting. A disk in trouble does not: its tier begins as a lost one, and what `Disk.open` has done by then, or does
later, is what the watch finds when it asks for it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait

from cachesvc.core.errors import CacheError, TierFailed
from cachesvc.core.model import TierName
from cachesvc.daemon.disks.renewal import Disk
from cachesvc.daemon.loop.lanes import Lane
from cachesvc.tiers.os_errors import translated

SILENT_S = 5.0
"""A disk of which nothing is heard for so long is not waited for; a million extents are listed in 256 answers."""
STANDSTILL_SILENT_S = 2.0
"""The same while readers wait for us to take over: the disk answered the old daemon until then."""
POLL_S = 0.1


class Opening:
    """One directory's."""

    def __init__(self, disk: Disk, probes: Lane) -> None:
        self.disk = disk
        self.probes = probes
        """The thread on which it is opened, and probed later: a call that hangs is waited for by the next."""
        self.done: Future[CacheError | None] = Future()
        self._heard_at = time.monotonic()

    def begin(self) -> None:
        """Start to open it."""
        self._heard()
        self.probes.submit(self._run, lambda _: None, lambda _: None)

    def skip(self) -> None:
        """Do not even try: the daemon before this one had lost it."""
        self.done.set_result(
            TierFailed(f"{self.disk.path} was lost when this daemon took over; it is tried again")
        )

    def silent_s(self) -> float:
        """For how long nothing was heard of the disk."""
        return time.monotonic() - self._heard_at

    def _run(self) -> None:
        failed: CacheError | None = TierFailed(f"{self.disk.path} was not opened; the log says more")
        try:
            with translated(str(self.disk.path), "open the cache directory"):
                self.disk.open(self._heard)
            failed = None
        except CacheError as error:
            failed = error
        finally:
            self.done.set_result(failed)

    def _heard(self) -> None:
        self._heard_at = time.monotonic()


def awaited(openings: Sequence[Opening], silent_s: float) -> dict[TierName, str]:
    """Wait until each is done, or silent for that long: why the tiers that are not open begin as lost ones. Raises
    what the operator has to mend."""
    waiting = list(openings)
    while waiting:
        wait([each.done for each in waiting], POLL_S, FIRST_COMPLETED)
        waiting = [each for each in waiting if not each.done.done() and each.silent_s() < silent_s]
    said = {each.disk.name: _why(each, silent_s) for each in openings}
    return {name: why for name, why in said.items() if why}


def _why(opening: Opening, silent_s: float) -> str:
    if not opening.done.done():
        return (
            f"{opening.disk.path} has not answered for {silent_s:.0f} s; look into dmesg, or replace the disk"
        )
    error = opening.done.result()
    if error is not None and not isinstance(error, TierFailed):
        raise error
    return str(error or "")
