"""A node with small budgets and overlapping datasets, and Hypothesis strategies for the events that it gets."""

from __future__ import annotations

import math
from collections.abc import Mapping

from hypothesis import strategies as st

from cachesvc.core.model import RAM, DatasetId, ExtentId, ReaderId, TierName
from cachesvc.core.node.node import Node
from cachesvc.core.records.copy_phases import CopyEvent, Phase
from cachesvc.core.tiering.policy import NodeSettings, TierSpec

NVME = TierName("nvme0")
EXTENTS = [(ExtentId(bytes([number]) * 16), 1 + number % 4) for number in range(24)]
EXTENT_IDS = tuple(extent for extent, _ in EXTENTS)
PREPARED = DatasetId("prepared")
MADE = [(ExtentId(bytes([100 + number]) * 16), 1 + number % 3) for number in range(8)]
SOURCES = tuple(EXTENTS[number // 2] for number in range(8))
"""The source extents of the prepared ones, two of each."""
SIZES = dict([*EXTENTS, *MADE])
DATASETS = {
    DatasetId("a"): tuple(EXTENTS[:10]),
    DatasetId("b"): tuple(EXTENTS[8:18]),
    DatasetId("c"): tuple(EXTENTS[16:20]),
}
BUDGETS = {RAM: 12, NVME: 14}
ROOMY = {RAM: 12, NVME: 70}
"""All data fits, and RAM reads ahead of NVMe."""
SAMPLE_BYTES = {DatasetId("a"): 3_000, DatasetId("b"): 0, DatasetId("c"): 100_000}
extents = st.sampled_from([extent for extent, _ in EXTENTS])
readers = st.integers(1, 4).map(ReaderId)
jobs = st.integers(1, 3)
datasets = st.sampled_from(sorted(DATASETS))
picks = st.integers(0, 1000)


def small_node(
    budgets: Mapping[TierName, int],
    unplanned_share: float,
    transitions: Mapping[tuple[Phase, CopyEvent], Phase],
) -> Node:
    """A node with these budgets, whose copies follow this table of transitions."""
    settings = NodeSettings(
        lookahead_bytes=4,
        max_fills=2,
        fill_bytes=5,
        preparing=2,
        max_attempts=2,
        scrub_bytes_per_s=200,
        unplanned_share=unplanned_share,
        hold_s=math.inf,
        claim_step=3,
    )
    made = Node([TierSpec(name, budget) for name, budget in budgets.items()], settings)
    made.copies.transitions = transitions
    return made
