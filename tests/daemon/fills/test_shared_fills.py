"""Fills that other nodes may follow."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from cachesvc.core.model import RAM, ExtentId
from cachesvc.daemon.fills.shared_fills import SharedFills
from tests.support.descriptors import descriptors

A = ExtentId(bytes(16))
OF_ONE_FILL = 3


@contextmanager
def few_descriptors(spare: int) -> Iterator[None]:
    """Let this process open only `spare` more descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.open("/dev/null", os.O_RDONLY)]
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 8, hard))
        try:
            while True:
                taken.append(os.dup(taken[0]))
        except OSError:
            pass
        for _ in range(spare):
            os.close(taken.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in taken:
            os.close(fd)


@pytest.mark.parametrize("spare", range(OF_ONE_FILL))
def test_a_fill_that_cannot_be_shared_leaves_no_descriptor(spare: int) -> None:
    fills, target = SharedFills(), os.memfd_create("target")
    before = descriptors()
    with few_descriptors(spare), pytest.raises(OSError, match="Too many open files"):
        fills.begin(A, RAM, 1, target)
    assert descriptors() == before
    with few_descriptors(OF_ONE_FILL):
        fills.end(fills.begin(A, RAM, 1, target))
    assert descriptors() == before
    os.close(target)
