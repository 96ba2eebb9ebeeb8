"""Extents of an NVMe tier whose bytes tell their number, for processes that are killed while they fill."""

from __future__ import annotations

import os

from cachesvc.core.errors import CorruptData
from cachesvc.core.model import ExtentId, TierName
from cachesvc.tiers.checksum import StreamedChecksums, verify
from cachesvc.tiers.nvme import NvmeTier

NAME = TierName("nvme0")
SIZE = 40_000
BUDGET = 12


def content(number: int) -> bytes:
    return number.to_bytes(8, "little") * (SIZE // 8)


def extent(number: int) -> ExtentId:
    return ExtentId(number.to_bytes(16, "big"))


def put(tier: NvmeTier, number: int) -> None:
    fd = tier.reserve(extent(number), SIZE)
    os.pwrite(fd, content(number), 0)
    checksums = StreamedChecksums(SIZE).checksums(fd)
    os.close(fd)
    tier.commit(extent(number), checksums)


def sound(tier: NvmeTier) -> set[int]:
    """Recover the tier, and return the extents that the check before the first grant passes; all their bytes must be
    right."""
    good = set()
    for resident in tier.recover():
        number = int.from_bytes(resident, "big")
        try:
            fd, checksums = tier.open(resident)
        except CorruptData:
            tier.evict(resident)
            continue
        assert checksums is not None
        try:
            verify(fd, checksums)
            assert os.pread(fd, SIZE + 1, 0)[:SIZE] == content(number), "a wrong byte passed"
            good.add(number)
        except CorruptData:
            tier.evict(resident)
        finally:
            os.close(fd)
    return good
