"""Ranges are stored while they arrive, in a memfd and in a file alike. A try that begins again replaces all that the one
before has stored."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachesvc.core.errors import TierFailed
from cachesvc.core.model import HUGE_BYTES, ExtentId
from cachesvc.system.buffers import Buffers
from cachesvc.system.fill_target import PASS_BYTES, RangeWriter, open_target
from cachesvc.system.huge_pages import SIZE_SEALS, is_memfd
from cachesvc.tiers.checksum import StreamedChecksums, verify
from cachesvc.tiers.ram import RamTier

MOST_BYTES = 3 * PASS_BYTES
BUFFERS = Buffers(MOST_BYTES)
KINDS = ("memfd", "file")


@contextmanager
def extent_file(kind: str, size_bytes: int) -> Iterator[int]:
    """A descriptor to fill, of the kind that the tier of that storage reserves."""
    if kind == "file":
        with tempfile.TemporaryFile() as file:
            file.truncate(size_bytes)
            yield file.fileno()
        return
    fd = os.memfd_create("target", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SIZE_SEALS)
    yield fd
    os.close(fd)


@given(
    kind=st.sampled_from(KINDS),
    at=st.integers(0, 1 << 18),
    size=st.integers(1, MOST_BYTES),
    tries=st.lists(st.lists(st.integers(0, MOST_BYTES), max_size=5), max_size=3),
    last=st.lists(st.integers(0, MOST_BYTES), max_size=5),
)
def test_the_last_try_is_what_is_stored_and_digested(
    kind: str, at: int, size: int, tries: list[list[int]], last: list[int]
) -> None:
    """Earlier tries end where they like and bring other bytes; the extent begins with `at` zeros."""
    checksums = StreamedChecksums(at + size)
    with extent_file(kind, at + size) as fd:
        assert is_memfd(fd) == (kind == "memfd")
        with (
            open_target(fd, at + size, BUFFERS, checksums.add) as target,
            target.room(at, size) as view,
        ):
            writer = RangeWriter(target, at, view)
            for number, counts in enumerate([*tries, last]):
                view[:] = bytes([number + 1]) * size
                writer.received(0)
                for count in sorted(min(count, size) for count in counts if count):
                    writer.received(count)
            writer.finish()
        assert os.pread(fd, at + size, 0) == bytes(at) + bytes([len(tries) + 1]) * size
        verify(fd, checksums.checksums(fd))


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_passed_on_before_the_range_is_complete(kind: str) -> None:
    passed: list[tuple[int, int]] = []
    with (
        extent_file(kind, 5 + MOST_BYTES) as fd,
        open_target(fd, 5 + MOST_BYTES, BUFFERS, lambda at, data: passed.append((at, len(data)))) as target,
        target.room(5, MOST_BYTES) as view,
    ):
        writer = RangeWriter(target, 5, view)
        writer.received(PASS_BYTES - 6)
        assert passed == []
        writer.received(2 * PASS_BYTES)
        assert passed == [(5, 2 * PASS_BYTES - 5)]
        writer.finish()
        assert sum(length for _, length in passed) == len(view)


@pytest.mark.parametrize("kind", KINDS)
def test_an_extent_that_was_filled_in_part_keeps_its_bytes(kind: str) -> None:
    """The next peer is asked for the missing blocks alone."""
    part, whole = b"\xff" * HUGE_BYTES, 3 * HUGE_BYTES
    with extent_file(kind, whole) as fd:
        for at in (HUGE_BYTES, 0, 2 * HUGE_BYTES):
            with open_target(fd, whole, BUFFERS) as target, target.room(at, HUGE_BYTES) as room:
                room[:] = part
                target.store(room, at)
        assert os.pread(fd, whole, 0) == part * 3


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_from_other_memory_is_read_back(kind: str) -> None:
    with extent_file(kind, PASS_BYTES) as fd, open_target(fd, PASS_BYTES, BUFFERS) as target:
        target.write(memoryview(b"decoded"), 3)
        found = bytearray(10)
        target.read(memoryview(found), 0)
        assert found == bytes(3) + b"decoded"
        with pytest.raises(TierFailed):
            target.read(memoryview(found), PASS_BYTES - 1)


def test_an_extent_is_sealed_while_a_child_lives_that_was_forked_during_its_fill() -> None:
    forks = multiprocessing.get_context("fork")
    sealed, extent, tier = forks.Event(), ExtentId(bytes(16)), RamTier()
    child = forks.Process(target=sealed.wait)
    fd = tier.reserve(extent, HUGE_BYTES)
    try:
        with open_target(fd, HUGE_BYTES, Buffers(0)):
            child.start()
        tier.commit(extent, StreamedChecksums(HUGE_BYTES).checksums(fd))
    finally:
        sealed.set()
        child.join()
        os.close(fd)
        tier.close()
