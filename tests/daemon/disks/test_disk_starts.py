"""Starts and takeovers beside a cache directory that fails, hangs, or is being replaced."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachesvc.core.errors import InvalidInput, TierFailed
from cachesvc.core.model import TierName
from cachesvc.daemon.disks.opening import SILENT_S, DirectoryOpening, wait_until_open
from cachesvc.daemon.disks.renewal import Disk
from cachesvc.daemon.disks.tier_threads import CLOSE_S
from cachesvc.daemon.fills.pool import STOP_S
from cachesvc.daemon.loop.lanes import Lane
from testbed.servers import free_ports
from tests.support.faults.disks import EXTENTS, LOST_S, Node, flip, mounted, node, sample, stored
from tests.support.faults.faulty_disk import FaultyDisk
from tests.support.faults.fuse import FaultyMount
from tests.support.processes import threads_in_fuse
from tests.support.waiting import wait_until

BACK_S = 60.0
SILENT = 0.5


# The openings.


class Fake(Disk):
    """A disk whose `open` is given."""

    def __init__(self, name: str, path: Path, open) -> None:  # type: ignore[no-untyped-def]
        super().__init__(TierName(name), path)
        self.open = open  # type: ignore[method-assign]


def begun(disk: Disk) -> DirectoryOpening:
    opening = DirectoryOpening(disk, Lane(f"probe-{disk.name}", lambda _: None, time.monotonic))
    opening.begin()
    return opening


def test_disks_that_hang_are_waited_for_concurrently(tmp_path: Path) -> None:
    answered = threading.Event()
    openings = [begun(Fake(f"nvme{n}", tmp_path, lambda heard: answered.wait())) for n in range(8)]
    began = time.monotonic()
    lost = wait_until_open(openings, SILENT)
    assert time.monotonic() - began < 7 * SILENT
    assert list(lost) == [f"nvme{n}" for n in range(8)]
    assert "has not answered" in lost["nvme0"]  # type: ignore[index]
    answered.set()


def test_a_disk_that_makes_progress_is_waited_for(tmp_path: Path) -> None:
    def slow(heard) -> None:  # type: ignore[no-untyped-def]
        for _ in range(6 * 8):
            time.sleep(SILENT / 8)
            heard()

    assert wait_until_open([begun(Fake("nvme0", tmp_path, slow))], 4 * SILENT) == {}


def test_an_error_that_the_operator_must_correct_is_raised(tmp_path: Path) -> None:
    def fails(heard) -> None:  # type: ignore[no-untyped-def]
        raise TierFailed("it is broken")

    broken = begun(Fake("nvme0", tmp_path, fails))
    assert wait_until_open([broken], SILENT) == {"nvme0": "it is broken"}
    with pytest.raises(InvalidInput, match="is no directory"):
        wait_until_open([broken, begun(Disk(TierName("nvme1"), tmp_path / "absent"))], SILENT)


# The daemon.


@pytest.fixture
def data(tmp_path: Path) -> bytes:
    (tmp_path / "good").mkdir()
    return sample(tmp_path)


def tiers_lost(found: Node) -> list[bool]:
    return [tier.lost for tier in found.control.status().tiers]


def restarted(found: Node) -> float:
    began = time.monotonic()
    found.daemon.start()
    return time.monotonic() - began


@contextlib.contextmanager
def beside(tmp_path: Path, data: bytes, disk: Path, more: tuple[str, ...] = ()) -> Iterator[Node]:
    """A daemon with a good directory, a directory on `disk`, and RAM for half of the data."""
    with node(tmp_path, data, f"{tmp_path}/good=8MiB", f"{disk}=8MiB", ram="1MiB", more=more) as found:
        found.fill()
        yield found


@pytest.mark.parametrize(("fault", "most_s"), [("eio", 5.0), ("hang", SILENT_S + 5.0)])
def test_a_daemon_starts_beside_a_disk_in_trouble(
    tmp_path: Path, data: bytes, fault: str, most_s: float
) -> None:
    with FaultyDisk(tmp_path) as disk, beside(tmp_path, data, disk.path) as found:
        assert found.daemon.stop() == 0
        disk.behave(fault)
        try:
            assert restarted(found) < most_s
            assert tiers_lost(found) == [False, False, True]
            assert found.read() == EXTENTS, "RAM and the other directory take them"
            said = [line for line in found.daemon.log.splitlines() if "a tier is lost" in line]
            assert len(said) == 1
            assert str(disk.path) in said[0]
        finally:
            disk.behave("")


@pytest.mark.parametrize(
    "given_up", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["at once", "when it is lost"]
)
def test_a_daemon_that_hangs_in_a_disk_as_it_ends_does_not_block_the_next_one(
    tmp_path: Path, data: bytes, given_up: bool
) -> None:
    more = ("--metrics", f"127.0.0.1:{free_ports(1)[0]}")
    with FaultyDisk(tmp_path) as disk, beside(tmp_path, data, disk.path, more) as found:
        old, hung = found.daemon.process, found.daemon.pid
        assert old is not None
        disk.behave("hang")
        try:
            wait_until(lambda: not given_up or found.tier("nvme1").lost, LOST_S)
            wait_until(lambda: threads_in_fuse(hung), LOST_S)
            old.terminate()
            wait_until(lambda: found.daemon.log.endswith(" sockets and memory now\n"), CLOSE_S + STOP_S + 5.0)
            assert old.wait(LOST_S) == 0
            restarted(found)
            assert tiers_lost(found) == [False, False, True]
            assert threads_in_fuse(hung), "it waits for the disk, without sockets and locks"
            assert found.read() == EXTENTS
        finally:
            disk.behave("")
        wait_until(lambda: tiers_lost(found) == [False] * 3, BACK_S)


@pytest.mark.skipif(bool(FaultyMount.why_not()), reason=f"NOT TESTED: {FaultyMount.why_not()}")
@pytest.mark.slow
def test_a_daemon_starts_while_lookups_of_a_cache_directory_hang(tmp_path: Path, data: bytes) -> None:
    with FaultyMount(tmp_path / "hung") as disk:
        disk.lookups_hang = True
        with node(tmp_path, data, f"{tmp_path}/good=8MiB", f"{disk.path}/cache=8MiB", ram="1MiB") as found:
            assert tiers_lost(found) == [False, False, True]
            disk.go_on()


def test_a_directory_that_is_named_twice_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "other").symlink_to("good")
    for other in ("good", "good/../good", "other"):
        with (
            pytest.raises(RuntimeError, match="once"),
            node(tmp_path, data, f"{tmp_path}/good=8MiB", f"{tmp_path}/{other}=8MiB"),
        ):
            pass


@pytest.mark.slow
@pytest.mark.parametrize("left", [True, False, None], ids=["with a temporary file", "empty", "laid out"])
def test_a_daemon_starts_beside_a_read_only_disk(tmp_path: Path, data: bytes, left: bool | None) -> None:
    with mounted(tmp_path / "ro", "size=16m") as disk, beside(tmp_path, data, disk) as found:
        assert found.daemon.stop() == 0
        if left:
            (disk / "cachesvc-nvme/v1/tmp" / ("0" * 32)).write_bytes(b"half")
        elif left is False:
            shutil.rmtree(disk / "cachesvc-nvme")
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        restarted(found)
        assert tiers_lost(found) == [False, False, True]
        assert found.read() == EXTENTS


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["eio", "hang"])
def test_a_disk_that_works_later_is_used_with_its_extents(tmp_path: Path, data: bytes, fault: str) -> None:
    with FaultyDisk(tmp_path) as disk, node(tmp_path, data, f"{disk.path}=8MiB", ram="64KiB") as found:
        found.fill()
        wait_until(lambda: len(stored(disk.backing)) >= EXTENTS - 1)
        assert found.daemon.stop() == 0
        flip(stored(disk.backing)[5], 100)
        disk.behave(fault)
        restarted(found)
        assert tiers_lost(found) == [False, True]
        disk.behave("")
        wait_until(lambda: not any(tiers_lost(found)), BACK_S)
        assert len(stored(disk.backing)) >= EXTENTS - 1, "nothing of it was evicted"
        assert found.read() == EXTENTS, "each verified before its first grant"
        assert found.tier().corrupt_extents == 1


@pytest.mark.slow
def test_a_takeover_while_a_new_directory_is_being_probed(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "nvme"
    path.mkdir()
    with node(tmp_path, data, f"{path}=8MiB", ram="1MiB") as found:
        shutil.rmtree(path)
        path.mkdir()
        wait_until(lambda: (path / "cachesvc-nvme/v1/extents").is_dir(), LOST_S)  # the successor is locked
        assert found.tier().lost
        found.daemon.take_over()
        wait_until(lambda: not found.tier().lost, BACK_S)
