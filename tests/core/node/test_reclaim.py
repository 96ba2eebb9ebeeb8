"""Extents that readers hold are recalled where they include the share of others."""

from __future__ import annotations

from cachesvc.core.commands import Command, Evict, Grant, Recall, Refuse, StartFill
from cachesvc.core.events import (
    DatasetDeclared,
    Demanded,
    Event,
    HoldReported,
    Pinned,
    ReaderGone,
    Released,
)
from cachesvc.core.model import RAM, DatasetId, ExtentId, ReaderId, Stay, TierName
from cachesvc.core.node.node import Node
from cachesvc.core.node.reclaim import INTERVAL_S, REPLY_S, ROUND_EXTENTS, UNANSWERED_LIMIT
from cachesvc.core.tiering.policy import NodeSettings, TierSpec
from tests.support.core.instant import carry_out
from tests.support.core.invariants import check

SIZE = 10
FIRST, SECOND = DatasetId("first"), DatasetId("second")
ONE, TWO, THREE = ReaderId(1), ReaderId(2), ReaderId(3)


def extents(dataset: DatasetId, count: int) -> list[ExtentId]:
    return [ExtentId((dataset + str(at)).encode().ljust(16)) for at in range(count)]


class Cache:
    """A RAM tier that fills and evicts at once, and readers that answer recalls."""

    def __init__(self, room: int) -> None:
        self.node = Node([TierSpec(RAM, room * SIZE)], NodeSettings())
        self.now = 0.0

    def declare(self, dataset: DatasetId, count: int, job: int) -> list[ExtentId]:
        found = extents(dataset, count)
        self.send(DatasetDeclared(job, dataset, tuple((each, SIZE) for each in found)))
        return found

    def send(self, event: Event) -> list[Command]:
        """Send an event; the commands that follow, including those of fills and evictions."""
        found = carry_out(self.node, event, now=self.now)
        check(self.node)
        return found

    def read(self, reader: ReaderId, wanted: list[ExtentId]) -> list[Stay]:
        """Demand and hold extents; how long each may be held."""
        stays: list[Stay] = []
        for extent in wanted:
            answers = self.send(Demanded(reader, 0, extent))
            stays += [each.stay for each in answers if isinstance(each, Grant)]
        return stays

    def recalled_for(self, reader: ReaderId, extent: ExtentId) -> list[ExtentId]:
        """The extents that are recalled as this one is demanded, and refused."""
        answers = self.send(Demanded(reader, 0, extent))
        assert any(isinstance(each, Refuse) for each in answers)
        return [each.extent for each in answers if isinstance(each, Recall)]

    def resident(self, wanted: list[ExtentId]) -> int:
        return sum(self.node.where(each) is not None for each in wanted)


def test_a_dataset_that_comes_later_gets_its_share_of_what_readers_hold_and_no_more() -> None:
    cache = Cache(8)
    first = cache.declare(FIRST, 8, ONE)
    assert cache.read(ONE, first) == ["kept"] * 8
    second = cache.declare(SECOND, 8, TWO)
    shelved = 0
    for extent in second * 3:
        cache.now += INTERVAL_S
        for answer in cache.send(Demanded(TWO, 0, extent)):
            if isinstance(answer, Recall):
                assert answer.reader == ONE
                assert not answer.wrong
                shelved += 1
                cache.send(Released(ONE, answer.extent))
        cache.send(Released(TWO, extent))
    share = cache.node.policy.shares.share_bytes(cache.node.policy.shares.datasets[FIRST]) / SIZE
    assert share <= cache.resident(first) <= share + 1, "below its share, or never asked"
    assert shelved == 8 - cache.resident(first)
    assert cache.resident(second) >= int(share)


def test_a_recalled_extent_is_held_for_one_read_and_its_last_reader_frees_it() -> None:
    cache = Cache(4)
    first = cache.declare(FIRST, 4, ONE)
    cache.read(ONE, first)
    cache.read(THREE, first)
    second = cache.declare(SECOND, 4, TWO)
    asked = cache.recalled_for(TWO, second[0])
    extent = asked[0]
    assert cache.read(THREE, [extent]) == ["once"]
    for reader in (ONE, THREE):
        assert Evict(extent, RAM) not in cache.send(Released(reader, extent))
    assert Evict(extent, RAM) in cache.send(Released(THREE, extent))
    assert StartFill(second[0], RAM) in cache.send(Demanded(TWO, 0, second[0]))


def test_recalls_are_sent_once_a_second_and_for_other_extents_where_none_is_released() -> None:
    cache = Cache(16)
    first = cache.declare(FIRST, 16, ONE)
    cache.read(ONE, first)
    second = cache.declare(SECOND, 2, TWO)
    asked = cache.recalled_for(TWO, second[0])
    assert asked
    assert cache.recalled_for(TWO, second[0]) == []
    cache.now += INTERVAL_S
    assert cache.recalled_for(TWO, second[0]) == [], "asked for again though it is on its way"
    cache.now += REPLY_S
    again = cache.recalled_for(TWO, second[0])
    assert again
    assert not set(again) & set(asked)


def test_pinned_extents_are_not_recalled_and_nothing_is_for_undeclared_reads() -> None:
    cache = Cache(4)
    first = cache.declare(FIRST, 4, ONE)
    cache.read(ONE, first)
    stranger = Demanded(THREE, 0, extents(SECOND, 1)[0], size_bytes=SIZE)
    assert not any(isinstance(each, Recall) for each in cache.send(stranger))
    cache.send(Pinned(FIRST))
    second = cache.declare(SECOND, 4, TWO)
    assert cache.recalled_for(TWO, second[0]) == []


def test_an_extent_that_is_pinned_after_its_recall_stays() -> None:
    cache = Cache(4)
    first = cache.declare(FIRST, 4, ONE)
    cache.read(ONE, first)
    second = cache.declare(SECOND, 4, TWO)
    cache.recalled_for(TWO, second[0])
    cache.send(Pinned(FIRST))
    assert not any(isinstance(each, Evict) for each in cache.send(ReaderGone(ONE)))
    assert cache.resident(first) == 4


def test_streaming_extents_are_recalled_where_an_extent_has_no_room_at_all() -> None:
    """Idle readers that hold all of a small window keep no reader waiting for ever."""
    cache = Cache(2)
    first = cache.declare(FIRST, 8, ONE)
    for reader, extent in ((ONE, first[0]), (TWO, first[1])):
        assert cache.read(reader, [extent])
    cache.now += INTERVAL_S
    asked = cache.recalled_for(THREE, first[2])
    assert len(asked) == 1
    holder = ONE if asked == [first[0]] else TWO
    cache.send(Released(holder, asked[0]))
    assert cache.read(THREE, [first[2]])


def test_a_reader_that_never_answers_is_sent_no_more_recalls_than_its_buffer_holds() -> None:
    cache = Cache(300)
    first = cache.declare(FIRST, 300, ONE)
    cache.read(ONE, first)
    second = cache.declare(SECOND, 300, TWO)

    def recalled_in_a_minute() -> list[ExtentId]:
        found: list[ExtentId] = []
        for _ in range(60):
            cache.now += INTERVAL_S
            found += cache.recalled_for(TWO, second[0])
        return found

    asked = recalled_in_a_minute()
    assert UNANSWERED_LIMIT <= len(asked) < UNANSWERED_LIMIT + ROUND_EXTENTS
    cache.send(Released(ONE, asked[0]))
    cache.send(Released(TWO, second[0]))
    cache.now += INTERVAL_S
    answers = cache.send(Demanded(TWO, 0, second[1]))
    assert any(isinstance(each, Recall) for each in answers), "it lives"


def test_holds_from_before_a_restart_are_not_recalled_without_a_ram_tier() -> None:
    node = Node([TierSpec(TierName("nvme0"), SIZE)], NodeSettings())
    node.handle(HoldReported(ONE, extents(FIRST, 1)[0], SIZE), 0.0)
    (second,) = extents(SECOND, 1)
    node.handle(DatasetDeclared(TWO, SECOND, ((second, 2 * SIZE),)), 0.0)
    assert node.handle(Demanded(TWO, 0, second), 1.0) == [Refuse(TWO, 0, second)]
    check(node)
