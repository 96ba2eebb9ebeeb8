"""Extents in an NVMe directory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from cachesvc.core.model import ExtentId, TierName
from cachesvc.tiers.checksum import StreamedChecksums
from cachesvc.tiers.nvme import NvmeTier, open_nvme

NAME = TierName("nvme0")


def extent(number: int) -> ExtentId:
    return ExtentId(number.to_bytes(16, "big"))


@contextmanager
def opened(directory: Path) -> Iterator[tuple[NvmeTier, dict[ExtentId, int]]]:
    """A tier over a directory, and the sizes of the extents that it found there."""
    with closing(open_nvme(NAME, directory)) as tier:
        yield tier, dict(tier.recover())


def put(tier: NvmeTier, number: int, data: bytes = b"bytes") -> None:
    fd = tier.reserve(extent(number), len(data))
    os.pwrite(fd, data, 0)
    checksums = StreamedChecksums(len(data)).checksums(fd)
    os.close(fd)
    tier.commit(extent(number), checksums)


def files(directory: Path) -> list[str]:
    root = directory / "cachesvc-nvme" / "v1"
    return sorted(p.stem for part in ("tmp", "extents") for p in (root / part).rglob("*") if p.is_file())
