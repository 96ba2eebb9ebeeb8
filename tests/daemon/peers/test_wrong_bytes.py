"""A member whose copies differ from the source is found, shut out and named, and what came from it is dropped."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cachesvc.client.control import Control
from testbed.node import Daemon
from tests.support.faults.fake_s3 import FakeS3, Object, fake_s3
from tests.support.keyed_cluster import CONTENTS, Cluster, bytes_from_source, prefetch, read, recorded, states
from tests.support.waiting import wait_until

SICK = "c"


class TwoFaced(Object):
    """An object of which the node `SICK` reads other bytes, as if its memory changed them before they are digested."""

    def __init__(self) -> None:
        super().__init__(len(CONTENTS), data=CONTENTS)
        self.asking = threading.local()

    def asked(self, request: BaseHTTPRequestHandler) -> None:
        self.asking.sick = f"KEY{SICK}" in request.headers["Authorization"]

    def span(self, first: int, last: int) -> bytes:
        data = super().span(first, last)
        return bytes(np.frombuffer(data, np.uint8) ^ 1) if self.asking.sick else data


def sick_bucket(server: FakeS3) -> None:
    found = TwoFaced()
    server.objects["d/0.bin"], server.refuse = found, found.asked


def rows(daemon: Daemon) -> dict[str, Any]:
    with Control(daemon.socket_dir) as control:
        return {each.name: each for each in control.nodes().nodes}


@pytest.mark.slow
def test_where_all_is_compared_no_wrong_byte_is_granted(tmp_path: Path) -> None:
    with fake_s3() as server, ExitStack() as stack:
        sick_bucket(server)
        cluster = Cluster(tmp_path, server, "abc")
        nodes = {
            name: stack.enter_context(cluster.node(name, "--compare-peers", "1")) for name in ("a", "b", "c")
        }
        healthy, other, sick = nodes.values()
        wait_until(lambda: all([*states(each).values()] == ["present"] * 3 for each in nodes.values()))
        prefetch(sick)
        assert [read(healthy), read(other)] == [CONTENTS] * 2
        wait_until(lambda: states(healthy)[SICK] == "wrong")
        assert "differs from the source" in recorded(healthy, "wrong_bytes", SICK)
        wait_until(lambda: recorded(sick, "wrong_bytes_here", "a"))
        wait_until(lambda: "than the source has" in rows(healthy)[SICK].why)


@pytest.mark.slow
def test_what_came_from_a_member_before_it_is_found_is_dropped(tmp_path: Path) -> None:
    with fake_s3() as server, ExitStack() as stack:
        sick_bucket(server)
        cluster = Cluster(tmp_path, server, "ac")
        small = ("--extent-bytes", str(len(CONTENTS) // 128))
        healthy, sick = (stack.enter_context(cluster.node(name, *small)) for name in "ac")
        wait_until(lambda: all([*states(each).values()] == ["present"] * 2 for each in (healthy, sick)))
        prefetch(sick)
        read(healthy)
        wait_until(lambda: recorded(healthy, "wrong_bytes", SICK))
        assert read(healthy) == CONTENTS
        assert bytes_from_source(healthy) <= len(CONTENTS) * 1.02


@pytest.mark.slow
def test_the_maker_is_to_blame_and_not_a_member_that_passed_its_bytes_on(tmp_path: Path) -> None:
    with fake_s3() as server, ExitStack() as stack:
        sick_bucket(server)
        cluster = Cluster(tmp_path, server, "abc")
        healthy = stack.enter_context(cluster.node("a", "--compare-peers", "1"))
        between, sick = (stack.enter_context(cluster.node(name)) for name in "bc")
        nodes = (healthy, between, sick)
        wait_until(lambda: all([*states(each).values()] == ["present"] * 3 for each in nodes))
        prefetch(sick)
        assert read(between) != CONTENTS
        sick.kill()
        wait_until(lambda: states(healthy)[SICK] == "away")
        assert read(healthy) == CONTENTS
        wait_until(lambda: recorded(healthy, "wrong_bytes", SICK))
        assert not recorded(healthy, "wrong_bytes", "b")
        assert states(healthy)["b"] == "present"
        wait_until(lambda: recorded(between, "wrong_bytes_here", "a"))
