"""A disk that is slow or hangs under the scrub does not delay grants from other disks."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from cachesvc.client.grants import DaemonGrants
from tests.support.faults.disks import AGAIN_S, EXTENT, EXTENTS, LOST_S, Node, node, sample, stored
from tests.support.faults.faulty_disk import FaultyDisk
from tests.support.reading import contents, granted
from tests.support.waiting import wait_until

HALF = (EXTENTS // 2 + 4) * EXTENT
SOON_S = 2.0
"""The limit for a grant on a busy host."""


def places(found: Node) -> list[str]:
    """Paths of the extents. All are granted once, so the daemon has checked them."""
    with closing(DaemonGrants(found.daemon.socket_dir, found.dataset)) as grants:
        answers = [granted(grants, index, LOST_S) for index in range(EXTENTS)]
        paths = [os.readlink(f"/proc/self/fd/{answer.fd}") for answer in answers]
        for answer in answers:
            os.close(answer.fd)
    return paths


def slowest(found: Node, indices: list[int], seconds: float) -> float:
    """The slowest grant of these extents in seconds, repeated, each through a new connection."""
    most, until = 0.0, time.monotonic() + seconds
    while time.monotonic() < until:
        for index in indices:
            with closing(DaemonGrants(found.daemon.socket_dir, found.dataset)) as grants:
                began = time.monotonic()
                answer = granted(grants, index, LOST_S)
                most = max(most, time.monotonic() - began)
                assert contents(answer) == found.data[index * EXTENT : (index + 1) * EXTENT]
    return most


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["read 1", "open 2", "hang"])
def test_a_disk_that_troubles_the_scrub_delays_no_other_disk(tmp_path: Path, fault: str) -> None:
    data, healthy = sample(tmp_path), tmp_path / "healthy"
    healthy.mkdir()
    hangs = fault == "hang"
    with (
        FaultyDisk(tmp_path) as disk,
        node(
            tmp_path,
            data,
            f"{healthy}={HALF}",
            f"{disk.path}={HALF}",
            more=("--scrub-rate", str(2 * EXTENT), "--fillers", "1"),
        ) as found,
        ExitStack() as stack,
    ):
        stack.callback(disk.behave, "")
        found.fill()
        wait_until(lambda: len(stored(healthy)) + len(stored(disk.backing)) == EXTENTS)
        found.daemon.kill()
        found.daemon.start()  # a round of the scrub begins, of 16 s
        here = [index for index, path in enumerate(places(found)) if path.startswith(f"{healthy}/")]
        assert 0 < len(here) < EXTENTS
        scrubbed = scrubbed_bytes(found, "nvme1")
        disk.behave(fault)
        assert slowest(found, here, LOST_S if hangs else 12.0) < SOON_S
        assert not found.tier("nvme0").lost
        assert found.tier("nvme1").lost == hangs
        assert scrubbed_bytes(found, "nvme0") > 0
        assert hangs or scrubbed_bytes(found, "nvme1") > scrubbed
        disk.behave("")
        wait_until(lambda: not found.tier("nvme1").lost, AGAIN_S)
        assert found.read() == EXTENTS


def scrubbed_bytes(found: Node, tier: str) -> int:
    return int(found.tier(tier).scrubbed_bytes)
