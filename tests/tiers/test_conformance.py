"""The conformance suite of every tier, and tests of checksums."""

from __future__ import annotations

import itertools
import mmap
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachesvc.core.errors import CorruptData, TierFailed
from cachesvc.core.model import RAM, ExtentId, TierName
from cachesvc.tiers.checksum import StreamedChecksums, block_digest, verify
from cachesvc.tiers.nvme import NvmeTier, open_nvme
from cachesvc.tiers.ram import RamTier
from cachesvc.tiers.tier import CHECKSUM_BLOCK_BYTES, Checksums, Tier

A, B = ExtentId(b"A" * 16), ExtentId(b"B" * 16)
DATA = os.urandom(CHECKSUM_BLOCK_BYTES + 4321)


@pytest.fixture(params=["ram", "nvme"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RamTier | NvmeTier]:
    before = set(os.listdir("/proc/self/fd"))
    made = RamTier() if request.param == "ram" else open_nvme(TierName("nvme0"), tmp_path)
    if isinstance(made, NvmeTier):
        assert made.recover() == {}
    yield made
    made.close()
    assert set(os.listdir("/proc/self/fd")) <= before, "a descriptor leaked"


def fill(tier: Tier, extent: ExtentId, data: bytes = DATA) -> Checksums:
    fd = tier.reserve(extent, len(data))
    try:
        os.pwrite(fd, data, 0)
        return StreamedChecksums(len(data)).checksums(fd)
    finally:
        os.close(fd)


def read(tier: Tier, extent: ExtentId) -> tuple[bytes, Checksums | None]:
    fd, checksums = tier.open(extent)
    try:
        return os.pread(fd, checksums.size_bytes if checksums else len(DATA), 0), checksums
    finally:
        os.close(fd)


def test_committed_bytes_come_back_with_their_checksums(tier: Tier) -> None:
    checksums = fill(tier, A)
    tier.commit(A, checksums)
    assert read(tier, A) == (DATA, checksums)


def test_a_reservation_that_shrinks_is_committed_at_its_new_size_for_good(tier: Tier) -> None:
    size_bytes = CHECKSUM_BLOCK_BYTES + 99
    fd = tier.reserve(A, len(DATA), shrinks=True)
    os.pwrite(fd, DATA, 0)
    tier.shrink(A, size_bytes)
    checksums = StreamedChecksums(size_bytes).checksums(fd)
    tier.commit(A, checksums)
    assert read(tier, A) == (DATA[:size_bytes], checksums)
    if isinstance(tier, RamTier):
        for other in (size_bytes - 1, size_bytes + 1):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, other)
    os.close(fd)


def test_a_granted_descriptor_survives_eviction(tier: Tier) -> None:
    tier.commit(A, fill(tier, A))
    fd, checksums = tier.open(A)
    tier.evict(A)
    assert checksums is not None
    verify(fd, checksums)
    os.close(fd)
    tier.commit(A, fill(tier, A, b"again"))
    assert read(tier, A)[0] == b"again"


def test_a_granted_descriptor_cannot_be_written(tier: Tier) -> None:
    tier.commit(A, fill(tier, A))
    fd, _ = tier.open(A)
    assert not os.get_inheritable(fd)
    with pytest.raises(OSError):
        os.pwrite(fd, b"x", 0)
    with pytest.raises(PermissionError):
        mmap.mmap(fd, 100, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    mmap.mmap(fd, len(DATA), mmap.MAP_SHARED, mmap.PROT_READ).close()
    os.close(fd)


def test_a_reservation_has_room_for_its_size_and_abort_gives_it_back(tier: Tier) -> None:
    fd = tier.reserve(A, 5000)
    assert os.fstat(fd).st_size >= 5000
    tier.abort(A)
    tier.abort(A)
    tier.abort(B)
    os.close(fd)
    tier.commit(A, fill(tier, A))
    assert read(tier, A)[0] == DATA


def test_a_commit_of_another_size_is_refused(tier: Tier) -> None:
    checksums = fill(tier, A)
    with pytest.raises(TierFailed, match="size"):
        tier.commit(A, Checksums(checksums.size_bytes - 1, checksums.digests))
    tier.abort(A)


def test_an_empty_extent_is_stored(tier: Tier) -> None:
    tier.commit(A, fill(tier, A, b""))
    assert read(tier, A) == (b"", Checksums(0, b""))


def test_a_second_reservation_of_one_extent_is_a_programmer_error(tier: Tier) -> None:
    os.close(tier.reserve(A, 10))
    with pytest.raises(AssertionError):
        tier.reserve(A, 10)


def test_a_sealed_memfd_cannot_be_written_however_it_is_reopened() -> None:
    tier = RamTier()
    writer = tier.reserve(A, len(DATA))
    os.pwrite(writer, DATA, 0)
    tier.commit(A, StreamedChecksums(len(DATA)).checksums(writer))
    granted, _ = tier.open(A)
    with pytest.raises(PermissionError):
        os.pwrite(writer, b"x", 0)
    reopened = os.open(f"/proc/self/fd/{granted}", os.O_RDWR)
    for attempt in (lambda: os.pwrite(reopened, b"x", 0), lambda: os.ftruncate(reopened, 1)):
        with pytest.raises(PermissionError):
            attempt()
    with pytest.raises(PermissionError):
        mmap.mmap(reopened, 100, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    assert tier.name == RAM
    assert read(tier, A)[0] == DATA
    for fd in (writer, granted, reopened):
        os.close(fd)
    tier.close()


def test_a_memfd_that_is_still_mapped_writable_is_not_committed() -> None:
    tier = RamTier()
    fd = tier.reserve(A, 4096)
    with mmap.mmap(fd, 4096) as live:
        live[:1] = b"x"
        with pytest.raises(TierFailed, match="mapped writable"):
            tier.commit(A, StreamedChecksums(4096).checksums(fd))
    tier.commit(A, StreamedChecksums(4096).checksums(fd))
    os.close(fd)
    tier.close()


def test_a_filler_cannot_outgrow_its_memfd() -> None:
    tier = RamTier()
    fd = tier.reserve(A, 4096)
    with pytest.raises(PermissionError):
        os.pwrite(fd, b"x", 5000)
    os.close(fd)
    tier.close()


@pytest.fixture(scope="module")
def scratch() -> Iterator[int]:
    fd = os.memfd_create("scratch")
    yield fd
    os.close(fd)


@settings(max_examples=30, deadline=None)
@given(
    size=st.integers(1, 3 * CHECKSUM_BLOCK_BYTES),
    where=st.floats(0, 1, exclude_max=True),
    flip=st.integers(1, 255),
)
def test_any_flipped_byte_is_found_and_its_block_named(
    scratch: int, size: int, where: float, flip: int
) -> None:
    os.ftruncate(scratch, 0)
    os.ftruncate(scratch, size)
    checksums = StreamedChecksums(size).checksums(scratch)
    verify(scratch, checksums)
    position = int(where * size)
    os.pwrite(scratch, bytes([flip]), position)
    with pytest.raises(CorruptData, match=rf"^block {position // CHECKSUM_BLOCK_BYTES} "):
        verify(scratch, checksums)


def test_streamed_blocks_give_the_checksums_of_the_extent(scratch: int) -> None:
    os.ftruncate(scratch, 0)
    os.pwrite(scratch, DATA, 0)
    blocks = [DATA[:CHECKSUM_BLOCK_BYTES], DATA[CHECKSUM_BLOCK_BYTES:]]
    assert StreamedChecksums(len(DATA)).checksums(scratch).digests == b"".join(map(block_digest, blocks))


def test_a_short_file_and_digests_of_another_size_are_corrupt(scratch: int) -> None:
    os.ftruncate(scratch, 100)
    checksums = StreamedChecksums(100).checksums(scratch)
    with pytest.raises(CorruptData, match="ends at byte 100"):
        StreamedChecksums(101).checksums(scratch)
    with pytest.raises(CorruptData, match="do not fit"):
        verify(scratch, Checksums(100, checksums.digests * 2))


@given(
    st.lists(st.integers(1, 3 * CHECKSUM_BLOCK_BYTES), min_size=1, max_size=5),
    st.integers(0, 1 << 32),
)
@settings(max_examples=25, deadline=None)
def test_streamed_digests_do_not_depend_on_the_pieces(cuts: list[int], seed: int) -> None:
    size = sum(cuts)
    data = random.Random(seed).randbytes(size)
    passing = StreamedChecksums(size)
    starts = list(itertools.accumulate(cuts, initial=0))
    order = list(range(len(cuts)))
    random.Random(seed).shuffle(order)
    fd = os.memfd_create("extent")
    try:
        os.pwrite(fd, data, 0)
        for i in order:
            passing.add(starts[i], memoryview(data)[starts[i] : starts[i + 1]])
        assert passing.checksums(fd) == StreamedChecksums(size).checksums(fd)
    finally:
        os.close(fd)
