"""One sick node harms nobody: its requests to the source hang, or the port that sends its extents is closed."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from cachesvc.client.control import Control
from cachesvc.client.grants import DaemonGrants
from cachesvc.client.protocol import Granted
from testbed import WAIT_S
from tests.support.faults.fake_s3 import fake_s3
from tests.support.faults.forwarding import forwarding
from tests.support.keyed_cluster import (
    CONTENTS,
    Cluster,
    bucket,
    bytes_from_source,
    opened,
    prefetch,
    read,
    recorded,
    states,
)
from tests.support.waiting import wait_until


@pytest.mark.slow
def test_a_member_whose_requests_hang_holds_up_the_others_once(tmp_path: Path) -> None:
    healed, asked = threading.Event(), threading.Event()

    def hang(request: BaseHTTPRequestHandler) -> None:
        if "KEYc" in request.headers["Authorization"] and "Range" in request.headers:
            asked.set()
            healed.wait()

    with fake_s3() as server, ExitStack() as stack:
        bucket(server)
        cluster = Cluster(tmp_path, server, "abc")
        daemons = [stack.enter_context(cluster.node(name)) for name in "abc"]
        stack.callback(healed.set)
        wait_until(lambda: all([*states(each).values()] == ["present"] * 3 for each in daemons))
        for each in daemons:
            opened(each)
        server.refuse = hang
        sick, *others = reversed(daemons)
        filling = threading.Thread(target=lambda: prefetch(sick))
        filling.start()
        assert asked.wait(WAIT_S)  # it leads some fills now
        assert [read(each) for each in others] == [CONTENTS] * 2
        assert sum(bytes_from_source(each) for each in others) == len(CONTENTS)
        filling.join(WAIT_S)
        assert read(sick) == CONTENTS
        assert bytes_from_source(sick) == 0


@pytest.mark.slow
def test_a_member_that_may_not_read_the_source_reads_through_one_that_has_the_dataset_open(
    tmp_path: Path,
) -> None:
    def refuse(request: BaseHTTPRequestHandler) -> tuple[int, str] | None:
        refused = "KEYb" in request.headers["Authorization"] and "Range" in request.headers
        return (403, "AccessDenied") if refused else None

    with fake_s3() as server, ExitStack() as stack:
        bucket(server)
        cluster = Cluster(tmp_path, server, "ab")
        helper, sick = (stack.enter_context(cluster.node(name)) for name in "ab")
        wait_until(lambda: all([*states(each).values()] == ["present"] * 2 for each in (helper, sick)))
        opened(sick)
        server.refuse = refuse
        reader = DaemonGrants(helper.socket_dir, opened(helper))
        stack.callback(reader.close)
        assert isinstance(
            reader.acquire([0], WAIT_S)[0], Granted
        )  # it has claimed the dataset, and holds one extent
        assert read(sick) == CONTENTS
        assert bytes_from_source(sick) == 0
        # An extent that comes late is asked for again; the helper has not kept those that it does not own.
        assert len(CONTENTS) <= bytes_from_source(helper) < 2 * len(CONTENTS)
        wait_until(lambda: "403" in recorded(sick, "left_out", "b"))


@pytest.mark.slow
def test_a_node_whose_extents_cannot_be_read_is_not_present(tmp_path: Path) -> None:
    with fake_s3() as server, ExitStack() as stack:
        bucket(server)
        cluster = Cluster(tmp_path, server, "ab", behind="b")
        stack.enter_context(forwarding(cluster.ports["b"]))
        node, sick = (stack.enter_context(cluster.node(name)) for name in "ab")
        wait_until(lambda: states(node) == {"a": "present", "b": "unreadable"})
        prefetch(sick)
        assert read(node) == CONTENTS
        assert bytes_from_source(node) == len(CONTENTS)
        with Control(node.socket_dir) as control:
            (why,) = (each.why for each in control.nodes().nodes if each.name == "b")
        assert f"127.0.0.2:{cluster.ports['b'] + 1}" in why
        wait_until(lambda: recorded(node, "left_out", "b"))
        stack.enter_context(forwarding(cluster.ports["b"] + 1))
        wait_until(lambda: states(node)["b"] == "present")
        wait_until(lambda: recorded(node, "read_again", "b"))
