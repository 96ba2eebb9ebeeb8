"""File descriptors that end with the body of a `with`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def closing_fd(fd: int) -> Iterator[int]:
    """Lend a descriptor to the body of a `with`, and close it afterwards."""
    try:
        yield fd
    finally:
        os.close(fd)
