"""Memory that readers hold from before a restart."""

from __future__ import annotations

from cachesvc.core.commands import Evict, Recall, Refuse, StartFill
from cachesvc.core.events import Corrupt, Demanded, EvictAsked, HoldReported, ReaderGone, Recovered, Released
from cachesvc.core.model import RAM, ExtentId, ReaderId
from cachesvc.core.node.node import Node
from cachesvc.core.tiering.policy import NodeSettings
from tests.support.core.invariants import check
from tests.support.core.names import DATASET, NVME, ONE, SIZE, THREE, TWO, A, B, C, D
from tests.support.core.node import declare, fill, node_of, read, tell


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
    assert [tier.held_bytes for tier in node.status().tiers] == [SIZE]
    tell(node, ReaderGone(TWO))
    assert [tier.held_bytes for tier in node.status().tiers] == [0]


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
    assert [tier.held_bytes for tier in node.status().tiers] == [0]
    node.handle(Released(TWO, B), 2000.0)  # its release ends no lease
    check(node)
