"""The copies that the parent holds, those that were filled last at the end."""

from __future__ import annotations

import os
from collections.abc import Iterator

from cachesvc.core.model import ExtentId
from cachesvc.daemon.parent.messages import COPIES_AT_ONCE, DIGESTS_AT_ONCE, CopyHeld


class HeldCopies:
    """Owns a descriptor for each copy, which keeps its memory."""

    def __init__(self) -> None:
        self._copies: dict[ExtentId, tuple[CopyHeld, int]] = {}

    def __len__(self) -> int:
        return len(self._copies)

    def __iter__(self) -> Iterator[tuple[CopyHeld, int]]:
        """The copies with their descriptors, those filled first at the beginning."""
        return iter(self._copies.values())

    def hold(self, copy: CopyHeld, fd: int) -> None:
        """Hold a copy, in place of an earlier one of its extent. `fd` is owned from here on."""
        self.drop(copy.extent)
        self._copies[copy.extent] = copy, fd

    def drop(self, extent: ExtentId) -> None:
        """Release a copy, if it is held."""
        found = self._copies.pop(extent, None)
        if found is not None:
            os.close(found[1])

    def shed(self, size_bytes: int) -> int:
        """Release the copies that were filled first, until they made `size_bytes`; return their bytes."""
        freed = 0
        while self._copies and freed < size_bytes:
            copy, _ = next(iter(self._copies.values()))
            self.drop(copy.extent)
            freed += copy.size_bytes
        return freed

    def batches(self) -> Iterator[list[tuple[CopyHeld, int]]]:
        """Yield all copies, those filled last first, in batches that fit a message. Descriptors stay owned here."""
        batch: list[tuple[CopyHeld, int]] = []
        digests = 0
        for copy, fd in reversed(list(self._copies.values())):
            if batch and (len(batch) == COPIES_AT_ONCE or digests + len(copy.digests) > DIGESTS_AT_ONCE):
                yield batch
                batch, digests = [], 0
            batch.append((copy, fd))
            digests += len(copy.digests)
        if batch:
            yield batch
