"""Names of readers, extents, datasets and tiers, for tests of the core."""

from __future__ import annotations

from cachesvc.core.model import DatasetId, ExtentId, ReaderId, TierName

NVME, NVME1 = TierName("nvme0"), TierName("nvme1")
A, B, C, D, E, F = (ExtentId(bytes([number]) * 16) for number in range(6))
ONE, TWO, THREE = ReaderId(1), ReaderId(2), ReaderId(3)
DATASET, OTHER = DatasetId("d"), DatasetId("o")
SIZE = 10
