"""Ranges are written while they arrive, and a try that begins again replaces all that the one before has written."""

from __future__ import annotations

import os

from hypothesis import given
from hypothesis import strategies as st

from cachesvc.sources.fill_target import PASS_BYTES, FillTarget, RangeWriter
from cachesvc.tiers.checksum import StreamedChecksums, verify

MOST_BYTES = 3 * PASS_BYTES


@given(
    at=st.integers(0, 1 << 18),
    size=st.integers(1, MOST_BYTES),
    tries=st.lists(st.lists(st.integers(0, MOST_BYTES), max_size=5), max_size=3),
    last=st.lists(st.integers(0, MOST_BYTES), max_size=5),
)
def test_the_last_try_is_what_is_written_and_digested(
    at: int, size: int, tries: list[list[int]], last: list[int]
) -> None:
    """Earlier tries end where they like and bring other bytes; the extent begins with `at` zeros."""
    fd = os.memfd_create("target", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, at + size)
        checksums = StreamedChecksums(at + size)
        view = memoryview(bytearray(size))
        writer = RangeWriter(FillTarget(fd, checksums.add), at, view)
        for number, counts in enumerate([*tries, last]):
            view[:] = bytes([number + 1]) * size
            writer.received(0)
            for count in sorted(min(count, size) for count in counts if count):
                writer.received(count)
        writer.finish()
        assert os.pread(fd, at + size, 0) == bytes(at) + view
        verify(fd, checksums.checksums(fd))
    finally:
        os.close(fd)


def test_bytes_are_passed_on_before_the_range_is_complete() -> None:
    fd = os.memfd_create("target", os.MFD_CLOEXEC)
    try:
        passed: list[tuple[int, int]] = []
        view = memoryview(bytearray(3 * PASS_BYTES))
        writer = RangeWriter(FillTarget(fd, lambda at, data: passed.append((at, len(data)))), 5, view)
        writer.received(PASS_BYTES - 6)
        assert passed == []
        writer.received(2 * PASS_BYTES)
        assert passed == [(5, 2 * PASS_BYTES - 5)]
        writer.finish()
        assert sum(length for _, length in passed) == len(view)
    finally:
        os.close(fd)
