"""Calls that another member answers, by a real server of its agent's calls; evictions that it missed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from cachesvc.config import ClusterSettings
from cachesvc.core.errors import DaemonUnavailable, InvalidInput, NotAllowed, NotFound
from cachesvc.core.placement.traits import Traits
from cachesvc.daemon.control.late_evictions import KEPT_S, MOST, LateEvictions
from cachesvc.daemon.peers.messages import ClusterReport, NodeRow
from cachesvc.daemon.peers.relays import Relays
from cachesvc.daemon.processes.threads import ThreadPool
from cachesvc.v1 import cachesvc_pb2 as pb
from cachesvc.v1 import services
from testbed.servers import free_ports
from tests.support.waiting import wait_until

LIST = pb.ListRequest().SerializeToString()


class Agent:
    """A member's agent, whose daemon evicts all that it is asked to."""

    def __init__(self) -> None:
        self.evicted: list[str] = []

    def Relay(self, request: pb.RelayRequest, context: grpc.ServicerContext) -> Iterator[pb.NodeAnswer]:
        if request.method == "Evict":
            self.evicted.append(pb.EvictRequest.FromString(request.request).dataset)
        yield pb.NodeAnswer()


@contextmanager
def served(servicer: object) -> Iterator[NodeRow]:
    """Serve the calls of a member; yield its row."""
    server, (port,) = grpc.server(ThreadPool(4, "agent")), free_ports(1)
    services.add_to_server(server, "Peers", servicer)
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    yield NodeRow("n1", f"127.0.0.1:{port}", "", 1, "present", 0, "", 0, traits=Traits(release="0.1.9"))
    server.stop(None).wait()


def relays(rows: Callable[[], NodeRow]) -> Relays:
    settings = ClusterSettings("static:n1:7070", "n0", "n0:7070")
    return Relays(settings, None, lambda: ClusterReport(me="n0", rows=(rows(),)))


def test_calls_that_are_not_relayed_are_refused_before_they_are_made() -> None:
    gone = NodeRow("n1", "127.0.0.1:1", "", 1, "away", 9, "it is listed no more", 0)
    found = relays(lambda: gone)
    with pytest.raises(NotFound, match="no member 'n2'"):
        list(found.call("n2", "List", LIST, True))
    with pytest.raises(NotAllowed, match="only the user who runs the daemon"):
        list(found.call("n1", "Evict", b"", False))
    with pytest.raises(InvalidInput, match="answer no Reload"):
        list(found.call("n1", "Reload", b"", True))
    with pytest.raises(DaemonUnavailable, match="it is away: it is listed no more"):
        list(found.call("n1", "List", LIST, False))
    assert not found.answers("n1")


def test_a_member_of_an_older_release_is_named_as_such() -> None:
    with served(object()) as row, pytest.raises(DaemonUnavailable, match=r"its release, 0\.1\.9, answers no"):
        list(relays(lambda: row).call("n1", "List", LIST, True))


def test_a_missed_eviction_is_made_once_when_the_member_is_back_and_not_when_it_is_over(
    tmp_path: Path,
) -> None:
    agent, now = Agent(), 1e9
    with served(agent) as row:
        state = replace(row, state="away")
        file = tmp_path / "late.json"
        late = LateEvictions(str(file), relays(lambda: state), now=lambda: now)
        late.keep(["n1"], ["old"])
        now += KEPT_S
        late.keep(["n1", row.address], ["one"])
        late.close()
        late = LateEvictions(str(file), relays(lambda: state), now=lambda: now)  # the daemon was restarted
        late.start()
        late.keep(["n1"], ["two"])
        assert not agent.evicted
        state = row
        wait_until(lambda: file.read_text() == "{}")
        assert sorted(agent.evicted) == ["one", "one", "two"], "by name and by address"
        late.close()


def test_missed_evictions_are_bounded(tmp_path: Path) -> None:
    late = LateEvictions(str(tmp_path / "late.json"), relays(lambda: pytest.fail("no member is asked")))
    late.keep(["n1"], [f"{each}" for each in range(MOST + 7)])
    assert len((tmp_path / "late.json").read_text().split(",")) == MOST
