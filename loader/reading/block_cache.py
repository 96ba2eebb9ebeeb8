"""Blocks of files that are held: a batch reads numbers of a few bytes each, many of which lie in the same block."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from loader.reading.held_extents import HeldExtent
from loader.reading.preadv import FileRange, read_into

BLOCK_BYTES = 4096
_MAX_BLOCKS = 8192
"""32 MiB in all: the offsets and numbers of the rows in a window of 256 MiB."""
Ints = npt.NDArray[np.int64]
_Key = tuple[int, int]


class BlockCache:
    """The blocks that were read last, of all files. Thread-safe."""

    def __init__(self) -> None:
        self._memory: npt.NDArray[np.uint8] | None = None
        self._slots: dict[_Key, int] = {}
        self._keys: list[_Key | None] = [None] * _MAX_BLOCKS
        self._next = 0
        self._lock = threading.Lock()

    def read(
        self, helds: Sequence[HeldExtent], offsets: Ints, width: int, out: npt.NDArray[np.uint8]
    ) -> None:
        """Set the rows of `out` [n, width] to the bytes at each offset of its extent, which lie in one block each.

        Raises what `read_into` raises.
        """
        with self._lock:
            if self._memory is None:
                self._memory = np.empty(_MAX_BLOCKS * BLOCK_BYTES, np.uint8)
            blocks = (offsets // BLOCK_BYTES).tolist()
            keys = [(held.serial, block) for held, block in zip(helds, blocks, strict=True)]
            missing = {key: held for key, held in zip(keys, helds, strict=True) if key not in self._slots}
            if missing:
                self._load(missing)
            slots = np.asarray([self._slots[key] for key in keys], np.int64)
            begins = slots * BLOCK_BYTES + offsets % BLOCK_BYTES
            out[:] = self._memory[begins[:, None] + np.arange(width)]

    def _load(self, missing: dict[_Key, HeldExtent]) -> None:
        """Read blocks, each in the place of the one that was read longest ago."""
        assert self._memory is not None
        wanted, taken = [], []
        for key, held in missing.items():
            begin = key[1] * BLOCK_BYTES
            size = min(BLOCK_BYTES, held.size_bytes - begin)
            slot, self._next = self._next, (self._next + 1) % _MAX_BLOCKS
            old, self._keys[slot] = self._keys[slot], None
            if old is not None:
                del self._slots[old]
            view = self._memory[slot * BLOCK_BYTES : slot * BLOCK_BYTES + size].data
            wanted.append(FileRange(held.fd, held.offset + begin, size, [view], -1))
            taken.append((key, slot))
        read_into(wanted)
        for key, slot in taken:
            self._keys[slot], self._slots[key] = key, slot
