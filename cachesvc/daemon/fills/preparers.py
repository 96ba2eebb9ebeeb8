"""Hands prepared extents to the processes that make them, and collects the digests that they report.

The daemon runs no user's code. A preparer is a process of a user's job: it gets the number of an extent and the descriptor
of its target, writes the prepared samples there, and reports the digests of its blocks as it goes. The core chooses the
extent and the preparer (`core/tiering/fill_starts.py`). One that reports nothing for `PREPARE_STALL_S` loses its extent.
What it still writes goes to a target that was dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from cachesvc.core import events
from cachesvc.core.errors import CorruptData, DeadlineExceeded, SourceUnavailable
from cachesvc.core.limits import PREPARE_STALL_S
from cachesvc.core.model import DatasetId, ReaderId
from cachesvc.daemon.processes.jobs import JobDone
from cachesvc.tiers.checksum import DIGEST_BYTES, block_count

log = logging.getLogger(__name__)
Offer = Callable[[ReaderId, int, int, int, int], None]
"""Sends a preparer the number of a piece of work, an extent's index, its size in bytes, and its target."""


@dataclass(slots=True)
class _Work:
    """An extent that a preparer makes. `deadline`: when it counts as stalled, in seconds of the clock."""

    preparer: ReaderId
    digests: bytearray
    size_bytes: int
    uneven: bool
    answered: Callable[[JobDone], None]
    deadline: float
    known: set[int] = field(default_factory=set)
    """Blocks whose digests have come."""


class Preparers:
    """Runs on the loop's thread. `clock` returns seconds."""

    def __init__(self, handle: Callable[[events.Event], None], clock: Callable[[], float]) -> None:
        self._handle, self._clock = handle, clock
        self.offer: Offer = lambda *_: None
        self._datasets: dict[ReaderId, DatasetId] = {}
        self._works: dict[int, _Work] = {}
        self._stalled: dict[int, ReaderId] = {}
        """Preparers that lost the work of this number, and have not ended it."""
        self._number = 0

    def joined(self, preparer: ReaderId, dataset: DatasetId) -> None:
        """Take a connected process that offers to prepare extents of its dataset."""
        self._datasets[preparer] = dataset
        self._handle(events.PreparerJoined(preparer, dataset))

    def left(self, preparer: ReaderId) -> None:
        """Fail the work of a process whose connection has ended. The core has heard that it is gone."""
        if self._datasets.pop(preparer, None) is None:
            return
        self._stalled = {number: each for number, each in self._stalled.items() if each != preparer}
        for number in [number for number, work in self._works.items() if work.preparer == preparer]:
            self._fail(number, SourceUnavailable.code, "the process that prepared an extent has ended")

    def make(
        self,
        preparer: ReaderId,
        index: int,
        size_bytes: int,
        target: int,
        uneven: bool,
        answered: Callable[[JobDone], None],
    ) -> None:
        """Have a preparer make an extent into `target`, which stays the caller's. `uneven`: it may take less than
        `size_bytes`. `answered` is called once."""
        self._number += 1
        digests = bytearray(block_count(size_bytes) * DIGEST_BYTES)
        work = _Work(preparer, digests, size_bytes, uneven, answered, self._clock() + PREPARE_STALL_S)
        self._works[self._number] = work
        self.offer(preparer, self._number, index, size_bytes, target)  # a broken connection ends in `left`

    def progress(self, preparer: ReaderId, number: int, first: int, text: str) -> None:
        """Take the digests of consecutive blocks, in hex. Raises ValueError for blocks that the extent does not have."""
        work = self._works.get(number)
        if work is None or work.preparer != preparer:
            return
        digests, at = bytes.fromhex(text), first * DIGEST_BYTES
        if len(digests) % DIGEST_BYTES or at + len(digests) > len(work.digests):
            raise ValueError(f"digests of blocks that prepared extent {number} does not have")
        work.digests[at : at + len(digests)] = digests
        work.known.update(range(first, first + len(digests) // DIGEST_BYTES))
        work.deadline = self._clock() + PREPARE_STALL_S

    def made(self, preparer: ReaderId, number: int, takes_bytes: int, code: int, message: str) -> None:
        """End a piece of work. `takes_bytes`: the size of an extent that may take less than was reserved, else 0. A
        preparer that had lost its work can work again."""
        if self._stalled.get(number) == preparer:
            del self._stalled[number]
            self._handle(events.PreparerJoined(preparer, self._datasets[preparer]))
            return
        work = self._works.get(number)
        if work is None or work.preparer != preparer:
            return
        size_bytes = takes_bytes if work.uneven else work.size_bytes
        blocks = block_count(size_bytes)
        if not code and (not 0 < size_bytes <= work.size_bytes or work.known != {*range(blocks)}):
            code, message = CorruptData.code, "a preparer reported an extent as made without all its digests"
        if code:
            self._fail(number, code, message)
        else:
            del self._works[number]
            digests = bytes(work.digests[: blocks * DIGEST_BYTES])
            work.answered(JobDone(digests=digests, size_bytes=size_bytes))

    def next_deadline(self) -> float:
        """See `Timer`."""
        return min((work.deadline for work in self._works.values()), default=float("inf"))

    def tick(self) -> None:
        """Take extents away from preparers that stall."""
        now = self._clock()
        for number, work in [*self._works.items()]:
            if work.deadline <= now and number in self._works:
                log.warning("a preparer stalls, and another gets its extent", extra={"reader": work.preparer})
                self._stalled[number] = work.preparer
                self._handle(events.PreparerStalled(work.preparer))
                message = f"a process that prepared an extent made no progress for {PREPARE_STALL_S:.0f} s"
                self._fail(number, DeadlineExceeded.code, message)

    def _fail(self, number: int, code: int, message: str) -> None:
        work = self._works.pop(number)
        work.answered(JobDone(code, message, retry=True))
