"""Nodes with --share-prepared read from each other what users prepared; others do not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cachesvc.client.control import Control
from cachesvc.core.model import DatasetId
from cachesvc.v1 import cachesvc_pb2 as pb
from loader import open_dataset
from testbed.node import Daemon
from tests.loader.prepare.pictures import (
    COUNT,
    SPELLED_BYTES,
    calls,
    half,
    same,
    spelled,
    write_pictures,
)
from tests.support.membership.nodes import Nodes, meet

SHARE = "--share-prepared"
PROBED = 10
"""The most pictures that a job prepares to learn what the function returns."""


def read(
    daemon: Daemon,
    data: str,
    called: Path,
    function: Callable[[Any], Any] = half,
    max_bytes: int = 0,
    dies: Daemon | None = None,
) -> tuple[int, pb.DatasetStatus]:
    """Read all prepared pictures; return how many were prepared for that, and the status of their dataset. A node that
    `dies` does so after the first picture."""
    called.write_text("")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CACHESVC_SOCKET", daemon.socket_dir)
        patch.setenv("CACHESVC", "require")
        patch.setenv("CALLS", str(called))
        plain, prepared = (
            open_dataset(data),
            open_dataset(data, prepare=function, prepare_max_bytes=max_bytes),
        )
        found = [prepared[0]]
        if dies is not None:
            dies.kill()
        found += [prepared[n] for n in range(1, COUNT)]
        made = len(calls(called))
        assert all(same(each, function(plain[n])) for n, each in enumerate(found))
        with Control(daemon.socket_dir) as control:
            (status,) = (each for each in control.status().datasets if "#" in each.dataset.uri)
        plain.close()
        prepared.close()
    return made, status


@pytest.mark.slow
def test_prepared_samples_travel_between_nodes_that_both_share_them(tmp_path: Path) -> None:
    nodes, called = Nodes(tmp_path, "abc"), tmp_path / "calls"
    pictures = write_pictures(nodes.data / "pictures")
    with nodes.node("a") as alone, nodes.node("b", SHARE) as first, nodes.node("c", SHARE) as second:
        meet(alone, first, second)
        assert read(alone, pictures, called)[0] == COUNT
        assert read(first, pictures, called)[0] == COUNT, "one that does not share gives nothing"
        made, status = read(second, pictures, called)
        assert made <= PROBED
        assert status.peer_bytes == status.resident_bytes > 0
        assert read(alone, pictures, called)[0] == 0


@pytest.mark.slow
def test_samples_of_unlike_shapes_travel_too_and_the_death_of_their_node_is_survived(tmp_path: Path) -> None:
    nodes, called = Nodes(tmp_path, "ab"), tmp_path / "calls"
    pictures = write_pictures(nodes.data / "pictures")
    with nodes.node("a", SHARE) as first, nodes.node("b", SHARE) as second:
        meet(first, second)
        made, of_first = read(first, pictures, called, spelled, SPELLED_BYTES)
        assert made == COUNT
        made, status = read(second, pictures, called, spelled, SPELLED_BYTES)
        assert made <= PROBED
        assert status.peer_bytes == status.resident_bytes == of_first.resident_bytes > 0
        with Control(second.socket_dir) as control:
            control.evict(DatasetId(status.dataset.id))
        made, status = read(second, pictures, called, spelled, SPELLED_BYTES, dies=first)
        assert PROBED < made < COUNT, "the rest was prepared"
        with Control(second.socket_dir) as control:
            assert "source_failed" not in [each.kind for each in control.events(0.0)]
        assert read(second, pictures, called, spelled, SPELLED_BYTES)[0] == 0
