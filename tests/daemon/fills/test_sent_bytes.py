"""Copies from a node that sent wrong bytes are dropped, and so is a copy of which another node says that it is wrong."""

from __future__ import annotations

import pytest

from cachesvc.core import events
from cachesvc.core.model import RAM, ExtentId
from cachesvc.core.node.node import Node
from cachesvc.core.tiering.policy import NodeSettings, TierSpec
from cachesvc.daemon.fills.sent_bytes import SentBytes
from tests.support.served_datasets import dataset

A, B, C = (ExtentId(bytes([number]) * 16) for number in range(3))


def sent_bytes() -> tuple[SentBytes, list[events.Event]]:
    told: list[events.Event] = []
    node = Node([TierSpec(RAM, 1000)], NodeSettings())
    return SentBytes(None, node, told.append, lambda: 1, lambda: 0), told


def test_what_came_from_the_node_is_dropped_and_nothing_else() -> None:
    sent, told = sent_bytes()
    sent.came(A, frozenset({"bad"}))
    sent.came(B, frozenset({"bad", "good"}))
    sent.came(C, frozenset({"good"}))
    sent.wrong("bad", A, dataset(1))
    assert told == [events.FillAgain(A, RAM), events.FillAgain(B, RAM)]
    sent.wrong("bad", A, dataset(1))
    assert len(told) == 2


def test_an_extent_that_came_again_from_the_source_stays() -> None:
    sent, told = sent_bytes()
    sent.came(A, frozenset({"bad"}))
    sent.came(A, frozenset())
    sent.came(B, frozenset({"bad"}))
    sent.evicted(B)
    sent.wrong("bad", C, dataset(1))
    assert told == []


def test_a_read_that_began_before_the_finding_is_doubtful() -> None:
    sent, _ = sent_bytes()
    assert not sent.doubtful("bad", 0.0)
    sent.wrong("bad", A, dataset(1))
    assert sent.doubtful("bad", 0.0)
    assert not sent.doubtful("bad", float("inf"))
    assert not sent.doubtful("good", 0.0)


def test_a_copy_that_another_node_found_wrong_is_dropped_and_the_next_one_compared() -> None:
    sent, told = sent_bytes()
    sent.told("c", A)
    assert told == [events.FillAgain(A, RAM)]
    assert not sent.due(B, 100)
    assert sent.due(A, 100)


def test_nothing_is_compared_where_this_account_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_REQUEST_PAYER", "requester")
    sent = SentBytes(1.0, Node([], NodeSettings()), lambda _: None, lambda: 1, lambda: 0)
    assert not sent.due(A, 100)
