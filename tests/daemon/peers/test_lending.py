"""The extents that the daemon lends its peer agent, and that each request is answered."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cachesvc.core import events
from cachesvc.core.errors import NotFound
from cachesvc.core.model import PREPARED_MARK, RAM, DatasetId, ExtentId, ReaderId
from cachesvc.core.node.node import Node
from cachesvc.core.tiering.policy import NodeSettings, TierSpec
from cachesvc.daemon.datasets import Datasets
from cachesvc.daemon.fills.holes import CopyHoles, HoleRecords
from cachesvc.daemon.fills.shared_fills import SharedFills
from cachesvc.daemon.peers import messages
from cachesvc.daemon.peers.lending import MAX_PENDING, Lending
from cachesvc.daemon.processes.spawn import channel_pair
from tests.support.served_datasets import dataset


class Lender:
    """A node that is filling an extent into its RAM, and the agent's end of the channel."""

    def __init__(self, folder: Path) -> None:
        self.node = Node([TierSpec(RAM, 1000)], NodeSettings())
        anything: Any = None
        self.datasets = Datasets(str(folder), anything, anything, anything)
        self.holes, self.fills = HoleRecords(lambda: 0.0), SharedFills()
        self.lending = Lending(self.node, anything, self.fills, self.holes, lambda _: 0)
        self.channel, self.agent = channel_pair()
        self.agent.setblocking(False)
        known = self.datasets.admit(dataset(1))
        self.extent: ExtentId = known.extent_ids[0]
        self.node.handle(events.DatasetDeclared(7, known.id, known.extents), 0.0)
        self.node.handle(events.Demanded(ReaderId(7), 1, self.extent), 0.0)

    def asked(self, number: int) -> None:
        self.lending.lend(self.channel, messages.BorrowExtent(number, self.extent))

    def answered(self) -> list[tuple[int, int]]:
        """The number of each answer that came, and of its descriptors."""
        found: list[tuple[int, int]] = []
        while True:
            try:
                received = messages.receive_in_agent(self.agent)
            except BlockingIOError:
                return found
            assert received is not None
            message, descriptors = received
            assert isinstance(message, messages.LentExtent)
            found.append((message.number, len(descriptors)))
            for fd in descriptors:
                os.close(fd)


@pytest.fixture
def lender(tmp_path: Path) -> Iterator[Lender]:
    found = Lender(tmp_path)
    yield found
    found.datasets.close()
    found.channel.close()
    found.agent.close()


def test_a_copy_with_holes_is_absent_at_once(lender: Lender) -> None:
    lender.holes.filled(lender.extent, RAM, CopyHoles("0:1", NotFound.code, "gone"))
    lender.node.handle(events.Filled(lender.extent, RAM, code=NotFound.code, message="gone"), 0.0)
    lender.asked(1)
    assert lender.answered() == [(1, 0)]


def test_requests_wait_for_a_fill_and_those_above_the_limit_are_answered_at_once(lender: Lender) -> None:
    for number in range(MAX_PENDING + 2):
        lender.asked(number)
    assert lender.answered() == [(MAX_PENDING, 0), (MAX_PENDING + 1, 0)]
    lender.fills.give_up(lambda extent: False)
    assert lender.answered() == []
    lender.fills.give_up(lambda extent: True)
    assert sorted(lender.answered()) == [(number, 0) for number in range(MAX_PENDING)]


def test_a_fill_that_begins_is_lent_with_its_progress(lender: Lender) -> None:
    lender.asked(1)
    target = os.memfd_create("target")
    fill = lender.fills.begin(lender.extent, RAM, 10, target)
    assert lender.answered() == [(1, 2)]
    lender.fills.end(fill)
    os.close(target)


@pytest.mark.parametrize("shares", [False, True])
def test_prepared_bytes_are_lent_when_complete_and_only_where_nodes_share_them(
    lender: Lender, shares: bool
) -> None:
    prepared, other = ExtentId(bytes(12) + PREPARED_MARK), DatasetId("f" * 32)
    anything: Any = None
    lending = Lending(lender.node, anything, lender.fills, lender.holes, lambda _: 0, shares)
    lender.node.handle(events.DatasetDeclared(8, other, ((prepared, 10),)), 0.0)
    lender.node.handle(events.Demanded(ReaderId(7), 2, prepared), 0.0)
    lending.lend(lender.channel, messages.BorrowExtent(1, prepared))
    assert lender.answered() == [(1, 0)], "a fill is under way, and no copy complete"
    lender.node.handle(events.Filled(prepared, RAM), 0.0)
    assert lending.lends(prepared) == shares
