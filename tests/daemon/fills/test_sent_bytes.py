"""Copies from a node that sent wrong bytes are dropped, and so is a copy of which another node says that it is wrong."""

from __future__ import annotations

import pytest

from cachesvc.core import events
from cachesvc.core.model import RAM, ExtentId
from cachesvc.core.node.node import Node
from cachesvc.core.placement.comparisons import maker_id
from cachesvc.core.tiering.policy import NodeSettings, TierSpec
from cachesvc.daemon.fills.sent_bytes import SentBytes
from tests.support.served_datasets import dataset

A, B, C = (ExtentId(bytes([number]) * 16) for number in range(3))


BAD, GOOD = maker_id("bad"), maker_id("good")


def sent_bytes() -> tuple[SentBytes, list[events.Event]]:
    told: list[events.Event] = []
    node = Node([TierSpec(RAM, 1000)], NodeSettings())
    return SentBytes(None, node, told.append, lambda: ["me", "bad", "good"], lambda: 0), told


def test_what_the_node_made_is_dropped_and_nothing_else() -> None:
    sent, told = sent_bytes()
    sent.came(A, BAD)
    sent.came(B, BAD)
    sent.came(C, GOOD)
    sent.wrong("bad", A, dataset(1))
    assert told == [events.FillAgain(A, RAM), events.FillAgain(B, RAM)]
    sent.wrong("bad", A, dataset(1))
    assert len(told) == 2


def test_an_extent_that_came_again_from_the_source_stays() -> None:
    sent, told = sent_bytes()
    sent.came(A, BAD)
    assert sent.maker_of(A) == BAD
    sent.came(A, 0)
    sent.came(B, BAD)
    sent.evicted(B)
    assert [sent.maker_of(A), sent.maker_of(B)] == [0, 0]
    sent.wrong("bad", C, dataset(1))
    assert told == []


def test_what_a_node_made_is_compared_from_then_on_until_it_is_right() -> None:
    sent, _ = sent_bytes()
    assert not sent.due(B, 100, BAD)
    sent.wrong("bad", A, dataset(1))
    assert [sent.due(B, 100, BAD), sent.due(B, 100, GOOD)] == [True, False]
    sent.right("bad")
    assert not sent.due(B, 100, BAD)


def test_a_maker_is_a_member_or_else_the_sender() -> None:
    sent, _ = sent_bytes()
    assert sent.name_of(BAD, "good") == "bad"
    assert sent.name_of(maker_id("gone"), "good") == "good"


def test_a_copy_that_another_node_found_wrong_is_dropped_and_the_next_one_compared() -> None:
    sent, told = sent_bytes()
    sent.told("c", A)
    assert told == [events.FillAgain(A, RAM)]
    assert not sent.due(B, 100, GOOD)
    assert sent.due(A, 100, GOOD)


def test_nothing_is_compared_where_this_account_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_REQUEST_PAYER", "requester")
    sent = SentBytes(1.0, Node([], NodeSettings()), lambda _: None, lambda: ["me", "bad"], lambda: 0)
    assert not sent.due(A, 100, BAD)
