"""One reserved address range per dataset: every mapped extent lies at its catalog address, so that a resident
dataset is one flat array."""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Any

import numpy as np

from cachesvc.core.errors import OutOfSpace
from cachesvc.core.model import PAGE_BYTES

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_MAP_FIXED, _MAP_NORESERVE, _PROT_NONE, _MADV_DONTFORK = 0x10, 0x4000, 0, 10
_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class AddressRange:
    """Reserved, unreadable memory of `size_bytes`, into which read-only descriptors are mapped.

    Touching a page where nothing is mapped kills the process: the reader alone decides what is touched, and
    changes mappings only while it touches nothing. A forked child does not have the range.
    """

    def __init__(self, size_bytes: int) -> None:
        """Raises OutOfSpace when the address space has no room."""
        self._size = max(PAGE_BYTES, size_bytes)
        self._home = self._place(None, self._size, _PROT_NONE, self._private(), -1, 0)
        self._keep_from_children(0, self._size)
        raw = (ctypes.c_ubyte * self._size).from_address(self._home)
        self.array: Bytes = np.ctypeslib.as_array(raw)
        self.array.flags.writeable = False
        self.memory = self.array.data

    @staticmethod
    def _private() -> int:
        return mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE

    def map(self, address: int, size_bytes: int, fd: int, offset: int) -> None:
        """Show `size_bytes` of `fd` from `offset` (a page multiple) at `address`. Pages are entered at once:
        one call without the interpreter lock instead of a fault per page with it."""
        flags = mmap.MAP_SHARED | _MAP_FIXED | _MAP_NORESERVE | getattr(mmap, "MAP_POPULATE", 0x8000)
        self._place(self._home + address, size_bytes, mmap.PROT_READ, flags, fd, offset)
        self._keep_from_children(address, size_bytes)

    def unmap(self, address: int, size_bytes: int) -> None:
        """Make the part unreadable again; it stays reserved."""
        self._place(self._home + address, size_bytes, _PROT_NONE, self._private() | _MAP_FIXED, -1, 0)
        self._keep_from_children(address, size_bytes)

    def close(self) -> None:
        """Give the range back. The caller has dropped every view of it."""
        if self._size:
            self.memory.release()
            del self.array
            _libc.munmap(self._home, self._size)
            self._size = 0

    def forget(self) -> None:
        """In a forked child: the range does not exist here."""
        self._size = 0

    def _place(
        self, at: int | None, size_bytes: int, protection: int, flags: int, fd: int, offset: int
    ) -> int:
        found = _libc.mmap(at, size_bytes, protection, flags, fd, offset)
        if found is None or found == _FAILED:
            why = os.strerror(ctypes.get_errno())
            raise OutOfSpace(f"cannot map {size_bytes} bytes: {why}; raise `ulimit -v` or vm.max_map_count")
        return int(found)

    def _keep_from_children(self, address: int, size_bytes: int) -> None:
        _libc.madvise(self._home + address, size_bytes, _MADV_DONTFORK)
