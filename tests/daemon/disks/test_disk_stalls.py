"""Fills go to other tiers while a disk hangs and is not lost yet."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.faults.disks import EXTENT, EXTENTS, LOST_S, lost, node, sample
from tests.support.faults.faulty_disk import FaultyDisk
from tests.support.waiting import wait_until

STALLED_S = 10.0
"""A probe is sent within 2 s and found silent 3 to 4.5 s later; the tier is lost after 15 s at the soonest."""


@pytest.mark.slow
@pytest.mark.alone
def test_reads_beside_a_disk_that_hangs_go_elsewhere_within_seconds(tmp_path: Path) -> None:
    data = sample(tmp_path)
    with (
        FaultyDisk(tmp_path) as disk,
        node(tmp_path, data, f"{disk.path}=16MiB", ram="1MiB") as found,
        ExitStack() as stack,
    ):
        stack.callback(disk.behave, "")
        disk.behave("hang")
        began = time.monotonic()
        assert found.read() == EXTENTS
        assert time.monotonic() - began < STALLED_S
        assert not lost(found)
        assert "a disk does not answer" in found.daemon.log
        disk.behave("")
        wait_until(lambda: "a disk answers again" in found.daemon.log, LOST_S)
        found.control.evict(found.dataset)
        found.fill()
        assert not lost(found)
        assert found.tier().used_bytes >= (EXTENTS - 16) * EXTENT
