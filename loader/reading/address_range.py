"""One reserved address range per dataset: every extent is mapped at its catalog address, so that a resident dataset is
one flat array."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from cachesvc.core.errors import OutOfSpace
from cachesvc.core.model import HUGE_BYTES, PAGE_BYTES
from cachesvc.system import mapping

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_MADV_DONTFORK, _MADV_DOFORK = 10, 11


class AddressRange:
    """Reserved, unreadable memory of `size_bytes`, into which read-only descriptors are mapped.

    An access to a page where nothing is mapped kills the process: only the reader accesses the range, and it changes
    mappings only where it does not read. Forked children do not inherit the range, except after `leave_to_children`.
    """

    def __init__(self, size_bytes: int) -> None:
        """Raises OutOfSpace when the address space has no room."""
        self._size = max(PAGE_BYTES, size_bytes)
        with _explained(self._size):
            self._home = mapping.reserve(self._size, HUGE_BYTES)
        self._keep_from_children(0, self._size)
        raw = (ctypes.c_ubyte * self._size).from_address(self._home)
        self.array: Bytes = np.ctypeslib.as_array(raw)
        self.array.flags.writeable = False
        self.memory = self.array.data

    @property
    def address(self) -> int:
        """The address at which the range begins in this process."""
        return self._home

    def map(self, address: int, size_bytes: int, fd: int, offset: int) -> None:
        """Map `size_bytes` of `fd` from `offset` (a page multiple) at `address`. Pages are populated at once: one call
        without the interpreter lock instead of a fault per page with it. Raises OutOfSpace."""
        flags = (
            mmap.MAP_SHARED
            | mapping.MAP_FIXED
            | mapping.MAP_NORESERVE
            | getattr(mmap, "MAP_POPULATE", 0x8000)
        )
        with _explained(size_bytes):
            mapping.place(self._home + address, size_bytes, mmap.PROT_READ, flags, fd, offset)
        self._keep_from_children(address, size_bytes)

    def unmap(self, address: int, size_bytes: int) -> None:
        """Make a part unreadable again; it stays reserved."""
        flags = mapping.RESERVED | mapping.MAP_FIXED
        with _explained(size_bytes):
            mapping.place(self._home + address, size_bytes, mapping.PROT_NONE, flags)
        self._keep_from_children(address, size_bytes)

    def leave_to_children(self) -> None:
        """Let children that are forked from now on inherit the range: they may hold views of it."""
        mapping.advise(self._home, self._size, _MADV_DOFORK)

    def close(self) -> None:
        """Free the range. The caller has dropped every view of it."""
        if self._size:
            self.memory.release()
            del self.array
            mapping.remove(self._home, self._size)
            self._size = 0

    def forget(self) -> None:
        """Leave the range alone in a forked child, where it is inherited or does not exist."""
        self._size = 0

    def _keep_from_children(self, address: int, size_bytes: int) -> None:
        mapping.advise(self._home + address, size_bytes, _MADV_DONTFORK)


@contextmanager
def _explained(size_bytes: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutOfSpace(
            f"cannot map {size_bytes} bytes: {error.strerror}; raise `ulimit -v` or vm.max_map_count"
        ) from None
