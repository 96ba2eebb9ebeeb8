"""Fixtures of the sources' tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture
def target() -> Iterator[int]:
    """A memfd to fill."""
    fd = os.memfd_create("target", os.MFD_CLOEXEC)
    yield fd
    os.close(fd)
