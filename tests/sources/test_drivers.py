"""Drivers of fsspec that hang or fail are given up in time, and asked again."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from cachesvc.core.errors import SourceUnavailable
from cachesvc.sources.remote import FsspecSource
from cachesvc.sources.resilient import Resilience, Resilient
from tests.support.clock import Clock


class Driver(MemoryFileSystem):
    """Hangs or fails in the next calls."""

    cachable = False
    hangs = fails = 0
    freed = threading.Event()

    def _misbehave(self) -> None:
        if self.hangs:
            self.hangs -= 1
            self.freed.wait()
        if self.fails:
            self.fails -= 1
            raise RuntimeError("driver: quota of the day")

    def cat_file(self, *arguments: Any, **named: Any) -> Any:
        self._misbehave()
        return super().cat_file(*arguments, **named)

    def find(self, *arguments: Any, **named: Any) -> Any:
        self._misbehave()
        return super().find(*arguments, **named)


@pytest.fixture
def driver() -> Iterator[tuple[Driver, str]]:
    made = Driver()
    root = f"memory://t{uuid.uuid4().hex}"
    fsspec.filesystem("memory").pipe_file(f"{root}/x", b"data" * 100)
    yield made, root
    made.freed.set()


def test_a_driver_that_hangs_is_given_up_and_asked_again(driver: tuple[Driver, str]) -> None:
    files, root = driver
    source = FsspecSource(files, call_s=0.2, list_s=0.2)
    (version,) = source.list(root)
    files.hangs = 2
    with pytest.raises(SourceUnavailable, match="its driver has not answered in 0 s"):
        source.read_into(version, 0, memoryview(bytearray(400)))
    with pytest.raises(SourceUnavailable, match="its driver has not answered"):
        list(source.list(root))
    files.hangs = 2
    into = bytearray(400)
    Resilient(source, Resilience(), clock := Clock(), sleep=clock.sleep).read_into(
        version, 0, memoryview(into)
    )
    assert into == b"data" * 100


def test_errors_of_a_driver_are_typed_and_tried_again(driver: tuple[Driver, str]) -> None:
    files, root = driver
    source = FsspecSource(files)
    files.fails = 1
    with pytest.raises(SourceUnavailable, match="quota of the day"):
        list(source.list(root))
    files.fails = 3
    patient = Resilient(source, Resilience(), clock := Clock(), sleep=clock.sleep)
    assert [each.size_bytes for each in patient.list(root)] == [400]
