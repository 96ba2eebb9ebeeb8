"""Each question about an extent is answered, whatever its owner does, and by a stand-in whatever it does itself."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from cachesvc.core.model import ExtentId
from cachesvc.core.placement.directory import SOURCE
from cachesvc.core.placement.roster import PROTOCOL_VERSION, Endpoint, Greeting, Roster
from cachesvc.daemon.peers.agent import hidden_from
from cachesvc.daemon.peers.locator import Locator
from cachesvc.daemon.peers.members import SETTLE_S, Members
from cachesvc.daemon.peers.owned_extents import OwnedExtents, Question
from cachesvc.daemon.peers.peer_calls import PeerCalls
from cachesvc.v1 import cachesvc_pb2 as pb
from cachesvc.v1 import services
from testbed import WAIT_S
from tests.support.waiting import wait_until

EXTENTS = [ExtentId(number.to_bytes(16, "big")) for number in range(1, 33)]
ME = "me"


class Forgetful:
    """A node that answers no question about extents, but the call."""

    def Hello(self, request: pb.HelloRequest, context: grpc.ServicerContext) -> pb.HelloReply:
        return pb.HelloReply(protocol=PROTOCOL_VERSION, name="other", instance="1", weight_bytes=1000)

    def __init__(self) -> None:
        self.questions = 0

    def Lookup(self, request: pb.LookupRequest, context: grpc.ServicerContext) -> pb.LookupReply:
        self.questions += len(request.questions)
        return pb.LookupReply()

    def Report(self, request: pb.ReportRequest, context: grpc.ServicerContext) -> pb.ReportReply:
        return pb.ReportReply()


@contextmanager
def served(servicer: object, at: str = "127.0.0.1:0") -> Iterator[str]:
    """Serve a node's calls; yields its address."""
    server = grpc.server(ThreadPoolExecutor(4))
    services.add_to_server(server, "Peers", servicer)
    port = server.add_insecure_port(at)
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait(WAIT_S)


def located(settle_s: float = SETTLE_S) -> tuple[Members, Locator]:
    """The parts of a peer agent that find extents."""
    calls = PeerCalls(None, "")
    hello = pb.HelloRequest(protocol=PROTOCOL_VERSION, name=ME, instance="0")
    roster = Roster(Greeting(ME, "0", PROTOCOL_VERSION, 1000), grace_s=600.0)
    found = Members(roster, calls, hello, lambda _: None, lambda _: None, lambda _: None, settle_s)
    return found, Locator(
        ME, found, OwnedExtents(ME, lambda extents, later, without_source=False: set()), calls
    )


def test_a_node_that_has_just_started_is_called_at_once() -> None:
    calls, hello = PeerCalls(None, ""), pb.HelloRequest()
    with served(Forgetful()) as address:
        assert calls.hello(address, hello).name == "other"
    with pytest.raises(grpc.RpcError):
        calls.hello(address, hello)
    with served(Forgetful(), address):
        calls.reconnect(address)
        assert calls.hello(address, hello).name == "other"


def listing(address: str) -> Any:
    def watch(changed: Callable[[frozenset[Endpoint]], None]) -> None:
        changed(frozenset({Endpoint(address, "other")}))

    return SimpleNamespace(watch=watch)


def test_an_answer_of_another_length_is_none() -> None:
    with served(Forgetful()) as address:
        known, locator = located()
        known.start(listing(address))
        wait_until(lambda: len(known.view.members) == 2)
        answers = queue.SimpleQueue[str]()
        for extent in EXTENTS:
            locator.locate(Question(extent), lambda answer: answers.put(answer.node))
        found = [answers.get(timeout=WAIT_S) for _ in EXTENTS]
        held, coming = locator.survey(EXTENTS)
    assert found == [SOURCE] * len(EXTENTS)
    assert (held, coming) == ([], [])


def test_a_node_that_is_left_out_is_not_asked() -> None:
    node = Forgetful()
    with served(node) as address:
        known, locator = located()
        known.start(listing(address))
        wait_until(lambda: len(known.view.members) == 2)
        answers = queue.SimpleQueue[str]()
        for extent in EXTENTS:
            locator.locate(Question(extent, left_out=("other",)), lambda answer: answers.put(answer.node))
        assert [answers.get(timeout=WAIT_S) for _ in EXTENTS] == [SOURCE] * len(EXTENTS)
        assert not node.questions


def test_fills_do_not_wait_for_ever_for_members_that_cannot_be_greeted() -> None:
    known, locator = located(settle_s=0.0)  # not started: the addresses of this node are in use
    answers = queue.SimpleQueue[str]()
    locator.locate(Question(EXTENTS[0]), lambda answer: answers.put(answer.node))
    assert answers.get_nowait() == SOURCE
    assert not known.settled


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.1.1", "localhost", "[::1]"])
def test_a_loopback_address_is_hidden_from_other_machines_only(host: str) -> None:
    mine, there = f"{host}:7070", "192.0.2.1:7070"
    assert hidden_from(mine, [mine, "127.0.0.2:7070"]) == ""
    assert hidden_from(mine, [mine, there]) == there
    assert hidden_from(there, ["192.0.2.2:7070"]) == ""


FRESH, INTERRUPTED = Question(EXTENTS[0]), Question(EXTENTS[0], ("owner",))


@pytest.fixture
def owned() -> OwnedExtents:
    """The stand-in fills all that it is asked for."""
    return OwnedExtents(ME, lambda extents, later, without_source=False: set(extents))


def asked(owned: OwnedExtents, asker: str, question: Question) -> str:
    (answer,) = owned.find(asker, [question])
    return answer.node


def test_an_interrupted_fill_is_not_sent_to_what_may_read_from_it(owned: OwnedExtents) -> None:
    owned.located(EXTENTS[0], "follower")  # and the follower reads from the first node
    assert asked(owned, "new", FRESH) == ME
    assert asked(owned, "first", INTERRUPTED) == SOURCE
    assert asked(owned, "second", INTERRUPTED) == "first"


def test_an_interrupted_fill_follows_a_stand_in_that_reads_the_source(owned: OwnedExtents) -> None:
    owned.located(EXTENTS[0], SOURCE)
    assert asked(owned, "first", INTERRUPTED) == ME


def test_a_stand_in_that_asked_itself_is_followed(owned: OwnedExtents) -> None:
    assert asked(owned, "first", INTERRUPTED) == ME
    owned.report("first", EXTENTS[:1], [], [], anew=False)
    assert asked(owned, ME, INTERRUPTED) == "first"
    owned.located(EXTENTS[0], "first")
    assert asked(owned, "second", INTERRUPTED) in (ME, "first")


def test_once_the_fill_has_ended_it_is_followed_again(owned: OwnedExtents) -> None:
    owned.located(EXTENTS[0], "follower")
    owned.report(ME, EXTENTS[:1], [], [], anew=False)
    assert asked(owned, "first", INTERRUPTED) == ME


WITHOUT_SOURCE = Question(EXTENTS[0], (SOURCE,))


class Daemon:
    """Answers as the daemon of a node: it fetches for a node without a source, and for no other. `found` is where its own
    fill was told to read."""

    def __init__(self) -> None:
        self.owned = OwnedExtents(ME, self.keep)
        self.found: list[str] = []

    def keep(self, extents: list[ExtentId], later: bool, without_source: bool = False) -> set[ExtentId]:
        if without_source:
            self.found += [asked(self.owned, ME, Question(extent)) for extent in extents]
        return set(extents) if without_source else set()


def test_a_node_without_a_source_is_helped_by_one_that_reads_it() -> None:
    daemon = Daemon()
    assert asked(daemon.owned, "sick", WITHOUT_SOURCE) == ME
    assert daemon.found == [SOURCE], "the helper must not wait for the one that it helps"


def test_a_node_without_a_source_is_not_noted_as_filling() -> None:
    owned = OwnedExtents(ME, lambda extents, later, without_source=False: set())
    assert asked(owned, "sick", WITHOUT_SOURCE) == SOURCE
    assert asked(owned, "other", FRESH) == SOURCE


@pytest.mark.parametrize("question", [FRESH, WITHOUT_SOURCE])
def test_a_node_that_has_no_source_itself_helps_nobody(owned: OwnedExtents, question: Question) -> None:
    """Its daemon says that it fills the extent: from the node that asks now, perhaps."""
    assert asked(owned, ME, WITHOUT_SOURCE) == SOURCE
    assert asked(owned, "helper", question) == SOURCE
    owned.report(ME, EXTENTS[:1], [], [], anew=False)
    assert asked(owned, "other", WITHOUT_SOURCE) == ME


def test_what_a_node_leaves_out_is_neither_named_nor_asked_to_fetch() -> None:
    asked_for: list[ExtentId] = []

    def keep(extents: list[ExtentId], later: bool, without_source: bool = False) -> set[ExtentId]:
        asked_for.extend(extents)
        return set(extents)

    owned = OwnedExtents(ME, keep)
    assert asked(owned, "first", Question(EXTENTS[0], left_out=(ME,))) == SOURCE
    assert not asked_for
    assert asked(owned, "second", Question(EXTENTS[0], left_out=(ME, "first"))) == SOURCE
