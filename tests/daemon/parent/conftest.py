"""Nodes for takeover tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.servers import Proxy, SeaweedFS
from tests.support.takeover import (
    ending_well,
    serving,
    stored,
)
from tests.support.training.jobs import Node, Records


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, s3_server: SeaweedFS) -> Iterator[Node]:
    """A node that several tests share, whose daemons take over from each other."""
    with Proxy(s3_server.endpoint.removeprefix("http://")) as proxy:
        found = serving(tmp_path_factory.mktemp("line"), s3_server, proxy)
        yield from ending_well(found)


@pytest.fixture
def own(tmp_path: Path, s3_server: SeaweedFS, proxy: Proxy) -> Iterator[Node]:
    """A node for a single test."""
    yield from ending_well(serving(tmp_path, s3_server, proxy))


@pytest.fixture
def node(shared: Node) -> Node:
    """The shared node, without faults and with counters at 0."""
    shared.proxy.faults.clear()
    shared.proxy.reset()
    return shared


@pytest.fixture
def records(node: Node) -> Records:
    """A cold dataset of eight extents."""
    return stored(node)
