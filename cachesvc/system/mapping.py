"""mmap(2) at a chosen address, which Python's own mmap cannot do, with munmap(2) and madvise(2) for it."""

from __future__ import annotations

import ctypes
import mmap
import os

MAP_FIXED, MAP_NORESERVE, PROT_NONE = 0x10, 0x4000, 0
RESERVED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
"""Flags of a reserved address range; with PROT_NONE it costs neither memory nor commit charge."""
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


def place(at: int | None, size_bytes: int, protection: int, flags: int, fd: int = -1, offset: int = 0) -> int:
    """Call mmap(2) and return the address. `at` None: the kernel chooses it. Raises OSError."""
    address = _libc.mmap(at, size_bytes, protection, flags, fd, offset)
    if address is None or address == _FAILED:
        raise _error()
    return int(address)


def reserve(size_bytes: int, alignment: int) -> int:
    """Reserve an unreadable range that begins at a multiple of `alignment`; return its address. Raises OSError."""
    address = place(None, size_bytes + alignment, PROT_NONE, RESERVED)
    start = -(-address // alignment) * alignment
    if start > address:
        remove(address, start - address)
    remove(start + size_bytes, address + alignment - start)
    return start


def remove(at: int, size_bytes: int) -> None:
    """Call munmap(2). Raises OSError."""
    if size_bytes and _libc.munmap(at, size_bytes):
        raise _error()


def advise(at: int, size_bytes: int, advice: int) -> None:
    """Call madvise(2). Raises OSError."""
    if _libc.madvise(at, size_bytes, advice):
        raise _error()


def _error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
