"""Extents that readers hold are recalled where they include the share of others; and holds from before a restart."""

from __future__ import annotations

from cachesvc.core.commands import Command, Evict, Grant, Recall, Refuse, StartFill
from cachesvc.core.events import (
    Corrupt,
    DatasetDeclared,
    Demanded,
    Event,
    EvictAsked,
    HoldReported,
    Pinned,
    ReaderGone,
    Recovered,
    Released,
)
from cachesvc.core.model import RAM, DatasetId, ExtentId, ReaderId, Stay, TierName
from cachesvc.core.node.node import Node
from cachesvc.core.node.reclaim import INTERVAL_S, REPLY_S, ROUND_EXTENTS, UNANSWERED_LIMIT
from cachesvc.core.tiering.policy import NodeSettings, TierSpec
from tests.support.core.instant import carry_out
from tests.support.core.invariants import check
from tests.support.core.names import DATASET, NVME, ONE, SIZE, THREE, TWO, A, B, C, D
from tests.support.core.node import declare, fill, node_of, read, status, tell

FIRST, SECOND = DatasetId("first"), DatasetId("second")


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


def test_bytes_held_from_before_a_restart_count_until_released() -> None:
    node = node_of(ram=2)
    tell(node, HoldReported(ONE, A, 2 * SIZE))
    assert tell(node, Demanded(TWO, 1, B, True, SIZE)) == [Refuse(TWO, 1, B)]
    tell(node, Released(ONE, A))
    assert tell(node, Demanded(TWO, 2, B, True, SIZE)) == [StartFill(B, RAM)]


def test_memory_that_two_readers_hold_counts_once() -> None:
    node = node_of(ram=2)
    tell(node, HoldReported(ONE, A, SIZE), HoldReported(TWO, A, SIZE))
    assert tell(node, Demanded(TWO, 1, B, True, SIZE)) == [StartFill(B, RAM)]
    tell(node, Released(ONE, A))
    assert [tier.held_bytes for tier in status(node).tiers] == [SIZE]
    tell(node, ReaderGone(TWO))
    assert [tier.held_bytes for tier in status(node).tiers] == [0]


def reported(reader: ReaderId, extent: ExtentId, user: int, most: int) -> HoldReported:
    return HoldReported(reader, extent, SIZE, user, most * SIZE)


def held_extents(node: Node) -> int:
    """Held bytes of the RAM tier, in extents."""
    return node.policy.tiers[RAM].held_bytes // SIZE


def test_a_users_readers_together_are_believed_up_to_its_limit() -> None:
    node = node_of(ram=8)
    tell(node, reported(ONE, A, 1000, 2), reported(TWO, B, 1000, 2), reported(TWO, C, 1000, 2))
    assert held_extents(node) == 2
    tell(node, reported(TWO, A, 1000, 2), reported(ONE, B, 1000, 2))
    assert held_extents(node) == 2, "the same memory"
    tell(node, reported(THREE, D, 1001, 2))
    assert held_extents(node) == 3, "another user"
    tell(node, Released(TWO, C), Released(ONE, B), Released(TWO, B), reported(ONE, C, 1000, 2))
    assert held_extents(node) == 3
    tell(node, ReaderGone(ONE), ReaderGone(TWO), ReaderGone(THREE))
    assert (held_extents(node), node.readers.holds.held_bytes) == (0, {})


def test_all_users_together_are_believed_up_to_the_budget() -> None:
    node = node_of(ram=2)
    tell(node, reported(ONE, A, 1000, 2), reported(TWO, B, 1001, 2), reported(THREE, C, 1002, 2))
    assert held_extents(node) == 2
    tell(node, reported(THREE, A, 1002, 2))
    assert held_extents(node) == 2


def test_a_false_report_of_holds_takes_no_more_than_its_limit_of_what_others_keep() -> None:
    node = node_of(ram=6)
    tell(node, declare(A, B, C, D))
    read(node, A, B, C, D)
    commands = tell(
        node, *(reported(TWO, ExtentId(bytes([number]) * 16), 1001, 3) for number in range(100, 164))
    )
    assert sum(isinstance(each, Evict) for each in commands) == 1


def test_the_release_of_a_hold_that_was_not_believed_ends_no_lease() -> None:
    node = node_of(ram=2)
    tell(node, Demanded(ONE, 1, A, True, SIZE))
    fill(node, A)
    tell(node, reported(ONE, A, 1000, 0), Released(ONE, A))
    assert tell(node, EvictAsked(DATASET, (A,))) == []
    tell(node, Released(ONE, A))
    assert tell(node, EvictAsked(DATASET, (A,))) == [Evict(A, RAM)]


def test_a_reader_that_holds_a_copy_which_is_in_ram_still_leases_it() -> None:
    node = node_of(ram=2)
    tell(node, Recovered(RAM, {A: SIZE}), declare(A), reported(ONE, A, 1000, 0))
    assert held_extents(node) == 0
    assert tell(node, EvictAsked(DATASET, (A,))) == []
    tell(node, Released(ONE, A))
    assert tell(node, EvictAsked(DATASET, (A,))) == [Evict(A, RAM)]


def test_a_reader_that_held_a_file_before_a_restart_is_asked_for_it_too() -> None:
    node = node_of(nvme=2)
    tell(node, Recovered(NVME, {A: SIZE}), declare(A), HoldReported(TWO, A, 0))
    assert Recall(TWO, A) in tell(node, Corrupt(A, NVME))
    assert tell(node, Released(TWO, A)) == []


def test_no_hold_is_believed_long_after_the_start() -> None:
    node = node_of(ram=2)
    node.handle(Demanded(ONE, 1, A, True, SIZE), 100.0)
    node.handle(HoldReported(TWO, B, 2 * SIZE, 1000, 2 * SIZE), 100.0 + NodeSettings().hold_s + 1.0)
    assert [tier.held_bytes for tier in status(node).tiers] == [0]
    node.handle(Released(TWO, B), 2000.0)  # its release ends no lease
    check(node)
