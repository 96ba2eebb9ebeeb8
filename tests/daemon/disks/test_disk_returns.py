"""Disks that hang and answer again are used again, and fills go elsewhere meanwhile; busy disks are never lost."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.held import held
from tests.support.faults.disks import EXTENT, EXTENTS, LOST_S, lost, node, on_faulty_disk, sample
from tests.support.waiting import wait_until

BACK_S = 60.0
STALLED_S = 10.0
"""A probe is sent within 2 s and found silent 3 to 4.5 s later; the tier is lost after 15 s at the soonest."""
LOADED_S = 45.0
"""Three times as long as a disk may stay without a quick answer."""
WRITERS = 6
WRITER = """
import os, sys
block, file = os.urandom(1 << 20), os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
while True:
    for at in range(8):
        os.pwrite(file, block, at << 20)
    os.fsync(file)
"""


@pytest.mark.slow
def test_a_disk_that_hangs_and_answers_again_is_used_again(tmp_path: Path) -> None:
    data = sample(tmp_path)
    with on_faulty_disk(tmp_path, data, ram="1536KiB") as (disk, found):
        assert found.daemon.process is not None
        pid = found.daemon.pid
        found.fill()
        assert found.read() == EXTENTS
        before = held(pid)
        disk.behave("hang")
        assert found.read() > 0
        wait_until(lambda: lost(found), LOST_S)
        began = time.monotonic()
        assert found.read() > 0, "extents of the disk are read elsewhere"
        assert time.monotonic() - began < LOST_S
        disk.behave("")
        wait_until(lambda: not lost(found), BACK_S)
        assert found.read() == EXTENTS, "its extents are verified and granted again"
        found.control.evict(found.dataset)
        found.fill()
        assert found.read() == EXTENTS, "and it takes fills again"
        wait_until(lambda: held(pid).descriptors <= before.descriptors)
        assert held(pid).threads <= before.threads, "no thread was given up"
        assert "a tier works again" in found.daemon.log


@contextlib.contextmanager
def busy(directory: Path) -> Iterator[None]:
    """Keep a disk's queue full: writers that overwrite a few MiB and sync them, over and over."""
    directory.mkdir()
    commands = [[sys.executable, "-c", WRITER, str(directory / str(number))] for number in range(WRITERS)]
    writers = [subprocess.Popen(command) for command in commands]
    try:
        yield
        assert all(writer.poll() is None for writer in writers), "the disk was busy all the time"
    finally:
        for writer in writers:
            writer.kill()
            writer.wait()


@pytest.mark.slow
def test_a_disk_that_others_keep_busy_is_never_lost(tmp_path: Path) -> None:
    """Uses the disk of the temporary directory; a tmpfs there proves little."""
    data = sample(tmp_path)
    nvme = tmp_path / "nvme"
    nvme.mkdir()
    with node(tmp_path, data, f"{nvme}=32MiB") as found, busy(nvme / "others"):
        end = time.monotonic() + LOADED_S
        rounds = 0
        while time.monotonic() < end:
            found.control.evict(found.dataset)
            found.fill()
            assert found.read() == EXTENTS
            assert not lost(found)
            rounds += 1
        assert rounds > 0
        assert "a tier is lost" not in found.daemon.log


@pytest.mark.slow
@pytest.mark.alone
def test_reads_beside_a_disk_that_hangs_go_elsewhere_within_seconds(tmp_path: Path) -> None:
    data = sample(tmp_path)
    with on_faulty_disk(tmp_path, data, size="16MiB", ram="1MiB") as (disk, found):
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
