"""Reads of an extent that bring nothing for a while are given up, all of them, and only these."""

from __future__ import annotations

import os
import threading
from collections.abc import Collection
from contextlib import closing

import pytest

from cachesvc.core.errors import SourceUnavailable
from cachesvc.core.model import Extent, ExtentId, ObjectVersion, Piece
from cachesvc.sources.fetch import Fetcher
from cachesvc.sources.read_watch import ReadWatch
from cachesvc.sources.source import OnReceived, ignore_received
from testbed import WAIT_S
from tests.support.reads import FakeSource

VERSIONS = [ObjectVersion(f"fake://{number}", 10, "v") for number in range(3)]
EXTENT = Extent(ExtentId(bytes(16)), tuple(Piece(each, 0, 10) for each in VERSIONS), 30, 30)


class Stuck(FakeSource):
    """A source whose first object comes at once, and whose others come once they are given up."""

    def __init__(self) -> None:
        self.given_up: set[int] = set()
        self.ended = threading.Event()

    def read_into(
        self, version: ObjectVersion, offset: int, into: memoryview, received: OnReceived = ignore_received
    ) -> None:
        if version is not VERSIONS[0]:
            assert self.ended.wait(WAIT_S)
            assert threading.get_ident() in self.given_up
            raise SourceUnavailable("interrupted")
        into[:] = bytes(10)

    def give_up(self, threads: Collection[int]) -> None:
        self.given_up.update(threads)
        if len(self.given_up) == 2:
            self.ended.set()


def test_all_reads_of_an_extent_that_bring_nothing_are_given_up() -> None:
    source, fd = Stuck(), os.memfd_create("target")
    os.ftruncate(fd, EXTENT.size_bytes)
    with (
        closing(Fetcher(lambda uri: source, threads=4)) as fetcher,
        ReadWatch(0.05, source.give_up) as watch,
        pytest.raises(SourceUnavailable),
    ):
        fetcher.fetch(EXTENT, fd, watch=watch)
    assert watch.expired
    os.close(fd)


def test_reads_that_bring_bytes_are_not_given_up() -> None:
    now, given_up = [0.0], threading.Event()
    looked = threading.Semaphore(0)

    def clock() -> float:
        looked.release()
        return now[0]

    with ReadWatch(0.01, lambda threads: given_up.set(), clock) as watch:
        for _ in range(5):
            watch.moved()
            now[0] += 0.009
            for _ in range(2):
                assert looked.acquire(timeout=WAIT_S)
        assert not watch.expired
        now[0] += 1.0
        assert given_up.wait(WAIT_S)
