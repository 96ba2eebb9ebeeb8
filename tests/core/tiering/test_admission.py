"""What reads of data that no job declared displace: see `core/tiering/admission.py`."""

from __future__ import annotations

import random
from collections import Counter
from itertools import cycle, islice

import pytest

from cachesvc.core.commands import StartFill
from cachesvc.core.events import Demanded, Released
from cachesvc.core.model import RAM, ExtentId, ReaderId, TierName
from cachesvc.core.node.node import Node
from cachesvc.core.tiering.policy import NodeSettings, TierSpec
from tests.support.core.instant import carry_out
from tests.support.core.invariants import check

SIZE = 10
CAPACITY = 120
READER = ReaderId(1)


def extents(program: int, count: int) -> list[ExtentId]:
    return [ExtentId(bytes([program, number >> 8, number & 255, 0]) * 4) for number in range(count)]


class Reads:
    """A node whose fills and evictions are done at once, read without datasets."""

    def __init__(self, share: float = 0.0) -> None:
        tiers = [TierSpec(RAM, CAPACITY * SIZE // 3), TierSpec(TierName("nvme0"), CAPACITY * SIZE * 2 // 3)]
        self.node = Node(tiers, NodeSettings(unplanned_share=share))
        self.fills: Counter[ExtentId] = Counter()
        self._now = 0.0

    def hit(self, extent: ExtentId) -> bool:
        self._now += 1.0
        events = (Demanded(READER, 1, extent, True, SIZE), Released(READER, extent))
        commands = [each for event in events for each in carry_out(self.node, event, now=self._now)]
        filled = [each.extent for each in commands if isinstance(each, StartFill)]
        self.fills.update(filled)
        return not filled

    def hit_rate(self, read: list[ExtentId]) -> float:
        found = sum(map(self.hit, read)) / len(read)
        check(self.node)
        return found


@pytest.mark.parametrize("share", [0.0, 0.1])
@pytest.mark.parametrize("shuffled", [False, True])
def test_a_program_that_reads_twice_what_the_cache_holds_hits_nearly_half(
    share: float, shuffled: bool
) -> None:
    reads, data, chance = Reads(share), extents(1, 2 * CAPACITY), random.Random(5)
    rates = [reads.hit_rate(chance.sample(data, len(data)) if shuffled else data) for _ in range(4)]
    assert rates[0] == 0
    assert min(rates[2:]) >= 0.45


def test_what_is_read_again_soon_displaces_what_a_scan_left() -> None:
    reads, scanned = Reads(), extents(1, 2 * CAPACITY)
    for _ in range(3):
        reads.hit_rate(scanned)
    rates = [reads.hit_rate(extents(model, CAPACITY // 2)) for model in range(2, 7) for _ in range(3)]
    assert rates[-2:] == [1.0, 1.0]


@pytest.mark.parametrize("scans", [0, 3])
def test_extents_that_programs_read_piece_by_piece_are_fetched_once_for_all_pieces(scans: int) -> None:
    reads = Reads()
    for _ in range(scans):
        reads.hit_rate(extents(1, 2 * CAPACITY))
    pieces = [[extent for extent in extents(program, 50) for _ in range(8)] for program in (2, 3)]
    reads.fills.clear()
    for read in islice(cycle(map(iter, pieces)), 2 * 400):
        reads.hit(next(read))
    assert set(reads.fills.values()) == {1}
