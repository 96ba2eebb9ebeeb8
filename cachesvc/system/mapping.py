"""mmap at an address of choice, which Python's own mmap cannot do; munmap and madvise for what it placed."""

from __future__ import annotations

import ctypes
import mmap
import os

MAP_FIXED, MAP_NORESERVE, PROT_NONE = 0x10, 0x4000, 0
RESERVED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
"""Flags of an address range that holds nothing yet; with PROT_NONE it costs neither memory nor commit charge."""
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
    """mmap(2): the address. Raises OSError."""
    found = _libc.mmap(at, size_bytes, protection, flags, fd, offset)
    if found is None or found == _FAILED:
        raise _error()
    return int(found)


def reserve(size_bytes: int, alignment: int) -> int:
    """The address of an unreadable range that begins at a multiple of `alignment`. Raises OSError."""
    found = place(None, size_bytes + alignment, PROT_NONE, RESERVED)
    start = -(-found // alignment) * alignment
    if start > found:
        remove(found, start - found)
    remove(start + size_bytes, found + alignment - start)
    return start


def remove(at: int, size_bytes: int) -> None:
    """munmap(2). Raises OSError."""
    if size_bytes and _libc.munmap(at, size_bytes):
        raise _error()


def advise(at: int, size_bytes: int, advice: int) -> None:
    """madvise(2). Raises OSError."""
    if _libc.madvise(at, size_bytes, advice):
        raise _error()


def _error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
