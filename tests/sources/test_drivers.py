"""Drivers of fsspec that hang or fail are given up in time, and asked again."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec import AbstractFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from cachesvc.core.errors import CorruptData, SourceChanged, SourceUnavailable
from cachesvc.core.model import ObjectVersion
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


class OneConnection(AbstractFileSystem):
    """A driver with one connection, as FTP's: a second call at a time, or one after a broken answer, mixes answers up."""

    protocol = "oneconnection"
    cachable = False
    bodies: ClassVar[dict[str, bytes]] = {f"{n:02d}": bytes([n]) * 1000 for n in range(20)}
    breaks: ClassVar[list[str]] = []
    made = 0

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        OneConnection.made += 1
        self._busy, self._broken = threading.Lock(), False

    def _use(self) -> None:
        if self._broken or not self._busy.acquire(blocking=False):
            self._broken = True
            raise OSError("226 an answer to another call")
        time.sleep(0.001)
        self._busy.release()

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        self._use()
        return {"name": path, "size": len(self.bodies[path]), "type": "file", "mtime": 1}

    def cat_file(self, path: str, start: int = 0, end: int = 0, **_: Any) -> bytes:
        self._use()
        if self.breaks and self.breaks.pop():
            self._broken = True
            raise OSError("426 connection closed")
        return self.bodies[path][start:end]


@pytest.mark.parametrize("broken", [0, 1])
def test_a_driver_that_is_not_safe_for_threads_is_called_by_one_at_a_time(broken: int) -> None:
    clock = Clock()
    patient = Resilient(FsspecSource(OneConnection()), Resilience(), clock, sleep=clock.sleep)
    OneConnection.breaks[:] = ["break"] * broken
    before = OneConnection.made

    def read(path: str) -> bytes:
        version = ObjectVersion(f"oneconnection://{path}", 1000, "1")
        into = bytearray(1000)
        patient.read_into(version, 0, memoryview(into))
        return bytes(into)

    with ThreadPoolExecutor(20) as threads:
        assert list(threads.map(read, OneConnection.bodies)) == list(OneConnection.bodies.values())
    assert OneConnection.made - before == broken, "a new connection after each break"


class Stating(Driver):
    """States only the facts of a file that a test gives, by `info` and `find` alike."""

    says: ClassVar[dict[str, Any]] = {}

    def info(self, path: str, **named: Any) -> Any:
        found = super().info(path, **named)
        return {key: found[key] for key in ("name", "size", "type")} | self.says

    def find(self, *arguments: Any, **named: Any) -> Any:
        return {name: self.info(name) for name in super().find(*arguments, **named)}

    def modified(self, path: str) -> Any:
        raise NotImplementedError


class StatingByCall(Stating):
    """States the time of a change only by `modified`."""

    at: ClassVar[datetime] = datetime(2026, 1, 1, tzinfo=timezone.utc)

    def modified(self, path: str) -> datetime:
        return self.at


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"modify": "20260101000000", "perm": "r"}, {"modify": "20260101000001", "perm": "r"}),  # FTP
        ({"mtime": 1.0, "time": 5.0}, {"mtime": 2.0, "time": 6.0}),  # SMB: `time` is that of the last access
        ({"content_hash": "a", "client_modified": "x"}, {"content_hash": "b", "client_modified": "x"}),
        ({"rev": "1"}, {"rev": "2"}),
        ({"modifiedTime": "2026-01-01"}, {"modifiedTime": "2026-01-02"}),
        ({"CRC": 1}, {"CRC": 2}),
        ({"versionId": "1", "created": "x"}, {"versionId": "2"}),
    ],
)
def test_a_version_is_what_the_driver_states_as_one(
    driver: tuple[Driver, str],
    caplog: pytest.LogCaptureFixture,
    before: dict[str, Any],
    after: dict[str, Any],
) -> None:
    files, root = Stating(), driver[1]
    files.says = before  # type: ignore[misc]
    source = FsspecSource(files)
    (version,) = source.list(root)
    assert version == source.head(version.uri)
    assert version.etag
    source.read_into(version, 0, memoryview(bytearray(400)))
    files.says = after  # type: ignore[misc]
    with pytest.raises(SourceChanged):
        source.read_into(version, 0, memoryview(bytearray(400)))
    assert "states no version" not in caplog.text


def test_a_driver_is_asked_for_the_time_of_a_change(driver: tuple[Driver, str]) -> None:
    files, root = StatingByCall(), driver[1]
    source = FsspecSource(files)
    (version,) = source.list(root)
    assert version.etag == str(StatingByCall.at.timestamp())


def test_where_nothing_can_tell_one_warning_says_so(
    driver: tuple[Driver, str], caplog: pytest.LogCaptureFixture
) -> None:
    source = FsspecSource(Stating())
    for _ in range(2):
        assert [version.etag for version in source.list(driver[1])] == [""]
    assert caplog.text.count("states no version") == 1


def test_a_file_that_its_driver_keeps_encoded_is_an_error_that_says_so(driver: tuple[Driver, str]) -> None:
    files, root = Stating(), driver[1]
    files.says = {"etag": "x", "contentEncoding": "gzip"}  # type: ignore[misc]
    with pytest.raises(CorruptData, match="Content-Encoding: gzip"):
        list(FsspecSource(files).list(root))
