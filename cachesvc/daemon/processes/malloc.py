"""The C library's heap."""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress


def release_free_memory() -> None:
    """Give back to the kernel what this process has freed and keeps for later. Where the C library has no such call
    (musl), what it keeps stays."""
    gc.collect()
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
