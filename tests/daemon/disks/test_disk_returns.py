"""Disks that hang and answer again are used again, fills and grants go elsewhere, and busy disks are never lost."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from cachesvc.client.grants import DaemonGrants
from testbed.held import held
from tests.support.faults.disks import (
    AGAIN_S,
    EXTENT,
    EXTENTS,
    LOST_S,
    Node,
    lost,
    node,
    on_faulty_disk,
    sample,
    stored,
)
from tests.support.faults.faulty_disk import FaultyDisk
from tests.support.reading import contents, granted
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
