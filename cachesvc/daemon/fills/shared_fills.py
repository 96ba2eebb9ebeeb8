"""Fills under way that other nodes may follow: each has its progress in shared memory."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

from cachesvc.core.model import ExtentId, TierName
from cachesvc.core.placement.directory import SOURCE
from cachesvc.core.placement.place_search import FillTimes, Hedges, PlaceSearch
from cachesvc.tiers.fill_progress import FillProgress


@dataclass(frozen=True, slots=True)
class Located:
    """The place to read an extent: from a node at HOST:PORT `address`, or from the source where both are "". `filling`: the
    node is fetching the extent itself. `compare`: it sent wrong bytes before."""

    node: str = SOURCE
    address: str = ""
    filling: bool = False
    compare: bool = False


class Locate(Protocol):
    """Finds out where to read an extent, apart from places that failed to give it or were late. `then` is called exactly
    once."""

    def __call__(
        self,
        extent: ExtentId,
        failed: tuple[str, ...],
        late: tuple[str, ...],
        then: Callable[[Located], None],
    ) -> None: ...


@dataclass(slots=True, eq=False)
class SharedFill:
    """A fill under way. It owns its descriptors: a read-only one of the target, and the progress."""

    extent: ExtentId
    tier: TierName
    readable: int
    progress_fd: int
    progress: FillProgress
    whole: bool = False
    """It succeeded, without holes."""
    complete_blocks: int = 0

    @property
    def complete(self) -> bool:
        """All blocks came. Where the fill does not succeed, some are wrong, and no other node can mend them."""
        return self.progress.complete(0) == self.progress.blocks

    def close(self) -> None:
        """Release the descriptors and the memory."""
        self.progress.close()
        os.close(self.readable)
        os.close(self.progress_fd)


MAX_SOURCE_FAILURES = 1024
"""Extents whose source failed, and that are to be filled again; of older ones nothing is remembered."""
_Begun = Callable[[SharedFill | None], None]


class SharedFills:
    """Fills by extent and tier. Runs on the loop's thread."""

    def __init__(self, hedges: Hedges | None = None) -> None:
        self.times, self.hedges = FillTimes(), hedges or Hedges()
        self._source_failures: dict[ExtentId, str] = {}
        """How the source failed in the last fill of an extent."""
        self._fills: dict[tuple[ExtentId, TierName], SharedFill] = {}
        self._waiting: defaultdict[ExtentId, list[_Begun]] = defaultdict(list)

    def begin(self, extent: ExtentId, tier: TierName, size_bytes: int, target: int) -> SharedFill:
        """Share a fill whose room is reserved. `target` stays the caller's. Raises OSError."""
        with ExitStack() as opened:
            progress_fd = FillProgress.create(size_bytes)
            opened.callback(os.close, progress_fd)
            readable = os.open(f"/proc/self/fd/{target}", os.O_RDONLY | os.O_CLOEXEC)
            opened.callback(os.close, readable)
            fill = SharedFill(extent, tier, readable, progress_fd, FillProgress(progress_fd, size_bytes))
            opened.pop_all()
        self._fills[(extent, tier)] = fill
        for begun in self._waiting.pop(extent, ()):
            begun(fill)
        return fill

    def when_begun(self, extent: ExtentId, then: _Begun) -> None:
        """Call `then` with the fill of an extent, at once or as soon as it begins; with None where it does not begin."""
        found = next((fill for (each, _), fill in self._fills.items() if each == extent), None)
        if found is not None:
            then(found)
        else:
            self._waiting[extent].append(then)

    def give_up(self, hopeless: Callable[[ExtentId], bool]) -> None:
        """Answer those who wait for fills that will not begin."""
        for extent in [extent for extent in self._waiting if hopeless(extent)]:
            for begun in self._waiting.pop(extent):
                begun(None)

    def end(self, fill: SharedFill) -> None:
        """End a fill, which is whole or failed."""
        del self._fills[(fill.extent, fill.tier)]
        if fill.whole and fill.complete:
            fill.progress.finish()
        else:
            fill.progress.abort()
        fill.close()

    def search(self, extent: ExtentId, size_bytes: int) -> PlaceSearch:
        """Begin the search for a place that gives an extent."""
        why = self._source_failures.pop(extent, "")
        return PlaceSearch(size_bytes, self.times, self.hedges, why)

    def note_source_failure(self, extent: ExtentId, why: str) -> None:
        """Remember for the next fill of an extent how the source failed."""
        self._source_failures[extent] = why
        if len(self._source_failures) > MAX_SOURCE_FAILURES:
            del self._source_failures[next(iter(self._source_failures))]

    def progressing(self, now: float) -> list[ExtentId]:
        """The extents of the fills that have got further since the last call."""
        moved = []
        for fill in self._fills.values():
            complete = sum(count for _, count in fill.progress.runs(0, fill.progress.blocks))
            if complete > fill.complete_blocks:
                fill.complete_blocks = complete
                moved.append(fill.extent)
                self.hedges.moved(fill.extent, now)
        return moved
