"""The scrub under a virtual clock: what is verified, at which rate, and when a round begins."""

from __future__ import annotations

from cachesvc.core import commands as cmd
from cachesvc.core import events as ev
from cachesvc.core.model import RAM, DatasetId, ExtentId, ReaderId, TierName
from cachesvc.core.node.node import Node
from cachesvc.core.node.scrub import ROUND_S
from cachesvc.core.tiering.policy import NodeSettings, TierSpec
from tests.support.core.node import status

FIRST, SECOND = TierName("nvme0"), TierName("nvme1")
READER = ReaderId(1)
RATE = 10
SIZE = 100


def extent(number: int) -> ExtentId:
    return ExtentId(number.to_bytes(16, "big"))


def node(*tiers: TierName) -> Node:
    return Node([TierSpec(name, 10**6) for name in tiers], NodeSettings(scrub_bytes_per_s=RATE))


def recovered(tier: TierName, *numbers: int) -> ev.Recovered:
    return ev.Recovered(tier, {extent(number): SIZE for number in numbers})


def fill(core: Node, number: int, now: float) -> None:
    (start,) = core.handle(ev.Demanded(READER, number, extent(number), size_bytes=SIZE), now)
    assert isinstance(start, cmd.StartFill)
    core.handle(ev.Filled(extent(number), start.tier), now)
    core.handle(ev.Committed(extent(number), start.tier), now)


def checks(core: Node, start: float, end: float) -> list[tuple[float, ExtentId]]:
    """The checks from `start` to `end`: time and extent. Each check ends at once."""
    found, now = [], start
    while max(now, due := core.next_deadline()) < end:
        now = max(now, due)
        for command in core.handle(ev.Tick(), now):
            assert isinstance(command, cmd.Verify)
            found.append((now, command.extent))
            core.handle(ev.Verified(command.extent, command.tier), now)
    return found


def test_a_small_tier_is_verified_once_a_round() -> None:
    core = node(FIRST)
    core.handle(recovered(FIRST, 1, 2, 3), 0.0)
    found = checks(core, 0.0, 3 * ROUND_S)
    assert len(found) == 9
    assert [at for at, _ in found[::3]] == [0.0, ROUND_S, 2 * ROUND_S]
    assert status(core).tiers[0].scrubbed_bytes == 9 * SIZE


def test_a_copy_that_could_not_be_read_is_not_counted_and_is_verified_later() -> None:
    core = node(FIRST)
    core.handle(recovered(FIRST, 1), 0.0)
    assert core.handle(ev.Tick(), 0.0) == [cmd.Verify(extent(1), FIRST)]
    core.handle(ev.Verified(extent(1), FIRST, looked=False), 0.0)
    assert status(core).tiers[0].scrubbed_bytes == 0
    assert len(checks(core, 0.0, 1.5 * ROUND_S)) == 1
    assert status(core).tiers[0].scrubbed_bytes == SIZE


def test_bytes_are_read_at_the_rate() -> None:
    core = node(FIRST)
    core.handle(recovered(FIRST, 1, 2, 3), 0.0)
    assert [at for at, _ in checks(core, 0.0, 100.0)] == [0.0, SIZE / RATE, 2 * SIZE / RATE]


def test_a_tier_that_takes_longer_than_a_round_is_verified_without_a_pause() -> None:
    core = node(FIRST)
    count = int(1.5 * ROUND_S * RATE / SIZE)
    core.handle(recovered(FIRST, *range(count)), 0.0)
    found = checks(core, 0.0, 3 * ROUND_S)
    assert len(found) == 2 * count, "no pause between two rounds"
    assert {each for _, each in found[:count]} == {each for _, each in found[count:]}


def test_new_copies_are_verified_in_the_next_round() -> None:
    core = node(FIRST)
    core.handle(recovered(FIRST, 1, 2), 0.0)
    assert len(checks(core, 0.0, 100.0)) == 2
    fill(core, 3, 100.0)
    assert checks(core, 100.0, ROUND_S) == []
    found = checks(core, ROUND_S, 2 * ROUND_S)
    assert {each for _, each in found} == {extent(1), extent(2), extent(3)}
    assert len(found) == 3


def test_the_first_copy_of_an_empty_tier_begins_a_round() -> None:
    core = node(FIRST)
    fill(core, 1, 5.0)
    assert checks(core, 5.0, ROUND_S) == [(5.0, extent(1))]


def test_each_tier_has_its_rounds_and_ram_has_none() -> None:
    core = node(RAM, FIRST, SECOND)
    core.handle(recovered(RAM, 9), 0.0)
    core.handle(recovered(FIRST, 1, 2), 0.0)
    assert len(checks(core, 0.0, 200.0)) == 2
    core.handle(recovered(SECOND, 3, 4), 200.0)
    found = checks(core, 200.0, 1.5 * ROUND_S)
    assert [each for _, each in found[:2]] == [extent(3), extent(4)]
    assert [each for at, each in found if at < 200 + ROUND_S][2:] == [extent(1), extent(2)]
    assert sorted(each for at, each in found if at >= 200 + ROUND_S) == [extent(3), extent(4)]


def test_evicted_copies_are_left_out_and_a_lost_tier_is_verified_again_when_it_is_back() -> None:
    core = node(FIRST)
    core.handle(recovered(FIRST, 1, 2, 3), 0.0)
    (command,) = core.handle(ev.Tick(), 0.0)
    assert isinstance(command, cmd.Verify)
    core.handle(ev.TierLost(FIRST), 1.0)
    assert checks(core, 1.0, 60.0) == []
    core.handle(ev.TierBack(FIRST), 60.0)
    (two, three) = {extent(1), extent(2), extent(3)} - {command.extent}
    for evict in core.handle(ev.EvictAsked(DatasetId(""), (two,)), 60.0):
        assert isinstance(evict, cmd.Evict)
        core.handle(ev.Evicted(evict.extent, evict.tier), 60.0)
    found = checks(core, 61.0, ROUND_S)
    assert [each for _, each in found] == [three]
