"""A node fetches for others the extents that it owns and is to keep, and any extent for a node without a source."""

from __future__ import annotations

from cachesvc.core.commands import StartFill
from cachesvc.core.events import Filled, PeerWants
from cachesvc.core.model import RAM
from tests.support.core.names import A, B, C
from tests.support.core.node import declare, node_of, tell


def test_a_node_fetches_nothing_for_others_where_all_data_fits_each() -> None:
    node = node_of(ram=4)
    tell(node, declare(A, B))
    assert tell(node, PeerWants(A)) == []
    assert not node.will_keep(A)


def test_a_node_without_a_source_gets_what_is_claimed_here() -> None:
    node = node_of(ram=4)
    assert tell(node, PeerWants(A, without_source=True)) == []
    tell(node, declare(A))
    assert tell(node, PeerWants(A, without_source=True)) == [StartFill(A, RAM)]
    assert node.will_keep(A)
    assert tell(node, PeerWants(A, without_source=True)) == []
    tell(node, Filled(A, RAM))
    assert node.where(A) == RAM


def test_it_gets_what_is_claimed_here_also_where_the_data_does_not_fit() -> None:
    node = node_of(ram=2)
    tell(node, declare(A, B, C))
    assert tell(node, PeerWants(C, without_source=True)) == [StartFill(C, RAM)]


def test_what_a_leaving_node_hands_on_takes_room_to_keep_and_none_of_the_window() -> None:
    node = node_of(ram=2)
    tell(node, declare(A, B, C))  # one is kept, and the others stream
    assert tell(node, PeerWants(A, handed_on=True)) == [StartFill(A, RAM)]
    tell(node, Filled(A, RAM))
    assert tell(node, PeerWants(B, handed_on=True)) == []
    assert not node.will_keep(B)
    assert node.where(A) == RAM
