"""Extents in RAM use huge pages if the kernel has them, and have the same bytes either way."""

from __future__ import annotations

import fcntl
import mmap
import os
import re
from collections.abc import Iterator
from math import lcm
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachesvc.catalog.address_space import unit
from cachesvc.core.model import HUGE_BYTES, PAGE_BYTES, ExtentId
from cachesvc.system.huge_pages import is_memfd, use_huge_pages
from cachesvc.tiers.ram import RamTier
from loader.reading.address_range import AddressRange

EXTENT = ExtentId(bytes(16))
SIZE = 3 * HUGE_BYTES + 12_345


def mapped_as_one(address: int) -> int:
    """Return the bytes of shared memory that this process maps by huge pages at an address."""
    text = Path("/proc/self/smaps").read_text()
    begin = re.search(rf"^{address:x}-", text, re.M)
    assert begin is not None
    found = re.search(r"ShmemPmdMapped:\s+(\d+) kB", text[begin.start() :])
    assert found is not None
    return int(found[1]) << 10


def kernel_collapses() -> bool:
    """Tell whether this kernel collapses a memfd into huge pages (Linux 6.1, and free 2 MiB)."""
    setting = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    release = tuple(int(part) for part in re.findall(r"\d+", os.uname().release)[:2])
    return release >= (6, 1) and setting.exists() and "[deny]" not in setting.read_text()


@pytest.fixture
def tier() -> Iterator[RamTier]:
    tier = RamTier()
    yield tier
    tier.close()


def test_bytes_beside_the_page_marks_are_zero_and_written_bytes_are_read(tier: RamTier) -> None:
    fd = tier.reserve(EXTENT, SIZE)
    assert is_memfd(fd)
    use_huge_pages(fd, SIZE)
    assert os.pread(fd, SIZE, 0) == bytes(SIZE)
    data = np.random.default_rng(0).bytes(SIZE)
    assert os.pwrite(fd, data, 0) == SIZE
    assert os.pread(fd, SIZE, 0) == data
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)  # no writable mapping is left
    os.close(fd)


def test_a_reader_maps_whole_huge_pages(tier: RamTier) -> None:
    if not kernel_collapses():
        pytest.skip("this kernel makes no huge pages of a memfd on demand: Linux 6.1 does")
    fd = tier.reserve(EXTENT, SIZE)
    use_huge_pages(fd, SIZE)
    span = AddressRange(4 * HUGE_BYTES)
    span.map(0, SIZE, fd, 0)
    address = span.array.ctypes.data
    assert address % HUGE_BYTES == 0
    assert mapped_as_one(address) == 3 * HUGE_BYTES
    assert not span.array[:SIZE].any()
    os.close(fd)
    span.close()


def test_small_extents_and_files_are_left_alone(tier: RamTier, tmp_path: Path) -> None:
    fd = tier.reserve(EXTENT, HUGE_BYTES - 1)
    use_huge_pages(fd, HUGE_BYTES - 1)
    assert os.fstat(fd).st_blocks == 0, "nothing was allocated"
    os.close(fd)
    with open(tmp_path / "extent", "w+b") as file:
        file.truncate(SIZE)
        assert not is_memfd(file.fileno())
        with mmap.mmap(file.fileno(), SIZE):
            use_huge_pages(file.fileno(), SIZE)  # the file system refuses; no error is raised
        assert file.read() == bytes(SIZE)


@given(st.integers(1, 1 << 20), st.integers(0, 1 << 30))
def test_records_and_pages_begin_together(record_bytes: int, limit_bytes: int) -> None:
    found = unit(record_bytes, limit_bytes)
    assert found % record_bytes == 0
    assert found % PAGE_BYTES == 0
    assert (found % HUGE_BYTES == 0) or lcm(record_bytes, HUGE_BYTES) > limit_bytes
