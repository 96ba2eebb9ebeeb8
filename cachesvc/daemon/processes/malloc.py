"""Freed memory of the C library's heap, given back to the kernel."""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress


def release_free_memory() -> None:
    """Collect garbage and trim the heap. A C library without `malloc_trim` (musl) keeps what it has."""
    gc.collect()
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
