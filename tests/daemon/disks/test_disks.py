"""A real daemon on disks in trouble: reads go on, and the tier is lost in time, comes back and is repaired."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import random
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from cachesvc.__main__ import run
from cachesvc.client.control import Control
from cachesvc.core.errors import OutOfSpace, TierFailed
from cachesvc.core.model import DatasetId
from cachesvc.daemon.disks.budgets import SHARE_SPARE
from testbed.node import Daemon
from tests.support.faults.disks import (
    AGAIN_S,
    EXTENT,
    EXTENTS,
    LOST_S,
    RECORDS,
    Node,
    flip,
    lost,
    mounted,
    node,
    on_faulty_disk,
    sample,
    stored,
)
from tests.support.waiting import wait_until


@pytest.fixture
def data(tmp_path: Path) -> bytes:
    return sample(tmp_path)


@contextlib.contextmanager
def isolation(found: Node) -> Iterator[list[float]]:
    """Yield a list that gets the seconds from now until the tier is lost."""
    began, after, ended = time.monotonic(), list[float](), threading.Event()

    def watch() -> None:
        with Control(found.daemon.socket_dir) as control:
            while not ended.wait(0.1) and not after:
                if any(tier.lost for tier in control.status().tiers):
                    after.append(time.monotonic() - began)

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield after
    finally:
        ended.set()
        watching.join()


def test_the_scrub_finds_every_flipped_bit_before_a_reader_does(tmp_path: Path, data: bytes) -> None:
    nvme = tmp_path / "nvme"
    nvme.mkdir()
    chance = random.Random(1)
    with node(tmp_path, data, f"{nvme}=32MiB", more=("--scrub-rate", "64MiB")) as found:
        found.fill()
        wait_until(lambda: len(stored(nvme)) == EXTENTS)
        found.daemon.kill()
        whole = {path: hashlib.sha256(path.read_bytes()).digest() for path in stored(nvme)}
        for path in chance.sample(stored(nvme), 5):
            flip(path, chance.randrange(EXTENT))
        found.daemon.start()  # a round of the scrub begins
        wait_until(lambda: found.tier().corrupt_extents == 5)
        found.fill()
        wait_until(lambda: {p: hashlib.sha256(p.read_bytes()).digest() for p in stored(nvme)} == whole)
        assert found.read() == EXTENTS
        assert found.tier().scrubbed_bytes > 0


def test_a_directory_that_disappears_is_lost_and_the_other_one_is_not(tmp_path: Path, data: bytes) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir()
    second.mkdir()
    with node(tmp_path, data, f"{first}=32MiB", f"{second}=32MiB") as found:
        found.fill()
        first.rename(tmp_path / "gone")
        wait_until(lambda: found.tier("nvme0").lost)
        assert found.read() == EXTENTS
        assert not found.tier("nvme1").lost


@pytest.mark.parametrize("ends", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_disk_that_answers_with_eio_is_lost_until_it_ends(tmp_path: Path, data: bytes, ends: bool) -> None:
    with on_faulty_disk(tmp_path, data, ram="1536KiB") as (disk, found):
        found.fill()
        disk.behave("eio")
        wait_until(lambda: lost(found), LOST_S)
        assert found.read() == EXTENTS
        if ends:
            disk.behave("")
            wait_until(lambda: not lost(found), AGAIN_S)
            found.control.evict(found.dataset)
            found.fill()
            assert found.read() == EXTENTS


@pytest.mark.slow
@pytest.mark.parametrize("call", ["create", "write", "rename"])
def test_a_disk_that_is_slow_in_writes_alone_is_lost_within_30_s(
    tmp_path: Path, data: bytes, call: str
) -> None:
    with on_faulty_disk(tmp_path, data, ram="1MiB") as (disk, found):
        assert found.read() == EXTENTS
        found.control.evict(found.dataset)
        disk.behave(f"{call} 5")
        with isolation(found) as after:
            while not after:
                assert found.read() == EXTENTS
                found.control.evict(found.dataset)
        assert "a tier is lost" in found.daemon.log
        assert after[0] < LOST_S
        began = time.monotonic()
        assert found.read() == EXTENTS
        assert time.monotonic() - began < 5.0, "no read waits for the disk any more"


@pytest.mark.slow
def test_a_disk_that_is_slow_to_sync_is_not_lost(tmp_path: Path, data: bytes) -> None:
    """Disks that others write to are slow to sync, too; readers wait for no sync."""
    with on_faulty_disk(tmp_path, data, ram="1MiB") as (disk, found):
        disk.behave("fsync 2")  # a commit takes 4 s
        until = time.monotonic() + LOST_S
        while time.monotonic() < until:
            assert not lost(found)
            assert found.read() == EXTENTS
        disk.behave("")
        assert "a tier is lost" not in found.daemon.log


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["5", "3600"], ids=["answers in 5 s", "hangs"])
def test_a_disk_that_hardly_answers_is_lost_within_30_s(tmp_path: Path, data: bytes, fault: str) -> None:
    with on_faulty_disk(tmp_path, data, ram="1536KiB") as (disk, found):
        found.fill()
        disk.behave(fault)
        with isolation(found) as after:
            assert found.read() > 0  # reads that wait for the disk are answered when it is lost
            wait_until(lambda: after, LOST_S)
        assert after[0] < LOST_S
        began = time.monotonic()
        found.read()
        assert time.monotonic() - began < 10.0
        disk.end()


def fill_disk(path: Path) -> None:
    with open(path / "others", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, os.statvfs(path).f_bfree * 4096)


def use_up_inodes(path: Path) -> None:
    with contextlib.suppress(OSError):
        for number in range(10_000):
            (path / f"other{number}").touch()


def make_room(path: Path) -> None:
    for other in path.glob("other*"):
        other.unlink()


def remount(mode: str, path: Path) -> None:
    # A remount to read-only is refused while a file is open for writing, and a fill may be under way.
    wait_until(lambda: subprocess.run(["mount", "-o", f"remount,{mode}", str(path)]).returncode == 0)


FULL = pytest.param(fill_disk, make_room, False, id="full")
NO_INODES = pytest.param(use_up_inodes, make_room, False, id="no inodes")
READ_ONLY = pytest.param(partial(remount, "ro"), partial(remount, "rw"), True, id="read-only")


@contextlib.contextmanager
def disk_in_trouble(
    tmp_path: Path, data: bytes, trouble: Callable[[Path], None]
) -> Iterator[tuple[Node, Path]]:
    """A node with RAM for half of its data, after three rounds of reads beside a disk in trouble."""
    with (
        mounted(tmp_path / "small", "size=4m,nr_inodes=600") as disk,
        node(tmp_path, data, f"{disk}=4MiB", ram="1MiB") as found,
    ):
        assert found.read() == EXTENTS
        found.control.evict(found.dataset)
        trouble(disk)
        for _ in range(3):
            assert found.read() == EXTENTS, "there is room in RAM for each"
        assert stored(disk) == []
        yield found, disk


@pytest.mark.slow
@pytest.mark.parametrize(("trouble", "end", "broken"), [FULL, READ_ONLY])
def test_a_disk_that_takes_nothing_any_more_fails_no_read(
    tmp_path: Path, data: bytes, trouble: Callable[[Path], None], end: object, broken: bool
) -> None:
    with disk_in_trouble(tmp_path, data, trouble) as (found, _):
        wait_until(lambda: lost(found) == broken, LOST_S)
        assert found.read() == EXTENTS
        assert broken or found.tier().full


@pytest.mark.slow
@pytest.mark.parametrize(("trouble", "end", "broken"), [FULL, NO_INODES, READ_ONLY])
def test_a_disk_that_accepts_writes_again_is_used_again(
    tmp_path: Path, data: bytes, trouble: Callable[[Path], None], end: Callable[[Path], None], broken: bool
) -> None:
    def used() -> bool:
        assert found.read() == EXTENTS
        assert lost(found) <= broken, "a full disk is not lost"
        return bool(stored(disk))

    with disk_in_trouble(tmp_path, data, trouble) as (found, disk):
        wait_until(lambda: lost(found) == broken, LOST_S)
        end(disk)
        wait_until(used, AGAIN_S)
        assert not lost(found)
        found.fill()
        assert found.read() == EXTENTS


@pytest.mark.slow
def test_pinned_extents_are_evicted_last_when_a_daemon_starts_with_a_smaller_budget(
    tmp_path: Path, data: bytes
) -> None:
    (tmp_path / "nvme").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other/0.bin").write_bytes(data[::-1])
    with node(tmp_path, data, f"{tmp_path}/nvme={3 * len(data)}") as found:
        found.fill()
        found.control.pin(found.dataset, True)
        *_, last = found.control.prefetch(found.control.open_dataset([f"{tmp_path}/other/"], RECORDS).id)
        assert last.resident_extents == EXTENTS
    with node(tmp_path, data, f"{tmp_path}/nvme={len(data) + 4 * EXTENT}") as found:
        wait_until(lambda: [row.pinned for row in found.control.list()] == [True])
        (row,) = found.control.list()
        assert row.resident_extents == EXTENTS


def test_evicted_bytes_are_free_when_evict_answers(tmp_path: Path, data: bytes) -> None:
    with on_faulty_disk(tmp_path, data) as (disk, found):
        for slow, call in (("rename 0.1", "commits"), ("unlink 0.05", "removals")):
            disk.behave(slow)
            found.fill()
            evicted = found.control.evict(found.dataset)
            assert (evicted.evicted_bytes, evicted.busy_bytes) == (len(data), 0), call
            assert found.tier().used_bytes == 0, call
        disk.behave("")
        assert stored(disk.path) == []


@pytest.mark.slow
def test_an_eviction_on_a_disk_that_hangs_is_not_waited_for(tmp_path: Path, data: bytes) -> None:
    with on_faulty_disk(tmp_path, data) as (disk, found):
        found.fill()
        disk.behave("hang")
        began = time.monotonic()
        assert found.control.evict(found.dataset).evicted_bytes == len(data)
        assert time.monotonic() - began < LOST_S


@pytest.mark.slow
def test_what_a_lost_tier_holds_is_not_called_evicted(
    tmp_path: Path, data: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    """A prefetch that finds no other room names the lost tier instead of a budget that is too small."""
    (tmp_path / "nvme").mkdir()
    with node(tmp_path, data, f"{tmp_path}/nvme=4MiB") as found:
        found.fill()
        wait_until(lambda: len(stored(tmp_path / "nvme")) == EXTENTS)  # committed: a lost tier ends commits
        (tmp_path / "nvme").rename(tmp_path / "away")
        wait_until(lambda: lost(found), LOST_S)
        assert run(["evict", found.dataset, "--socket", found.daemon.socket_dir]) == TierFailed.code
        assert "2.0 MiB are in a lost tier" in capsys.readouterr().out
        assert run(["prefetch", found.dataset, "--socket", found.daemon.socket_dir]) == OutOfSpace.code
        assert "the room of nvme0 is lost" in capsys.readouterr().err
        (tmp_path / "away").rename(tmp_path / "nvme")
        wait_until(lambda: not lost(found), LOST_S)
        assert found.control.evict(found.dataset).evicted_bytes == len(data)


def test_verify_reports_a_missing_file_as_corrupt_or_unreadable(
    tmp_path: Path, data: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "nvme").mkdir()
    with node(tmp_path, data, f"{tmp_path}/nvme=4MiB") as found:
        found.fill()
        stored(tmp_path / "nvme")[0].unlink()
        assert run(["verify", found.dataset, "--socket", found.daemon.socket_dir]) == 5
        assert "corrupt or not to be read" in capsys.readouterr().err
        assert "unreadable" in [event.kind for event in found.control.events(0)]


@pytest.mark.slow
def test_two_daemons_over_one_state_directory_lose_no_pin(tmp_path: Path, data: bytes) -> None:
    count = 12
    for number in range(2 * count):
        (tmp_path / f"pinned{number}").mkdir()
        (tmp_path / f"pinned{number}/0.bin").write_bytes(data[:EXTENT])

    def pin(socket: str, numbers: range) -> list[DatasetId]:
        with Control(socket) as control:
            ids = [control.open_dataset([f"{tmp_path}/pinned{each}/"], RECORDS).id for each in numbers]
            for dataset in ids:
                control.pin(dataset, True)
        return ids

    options = ["--ram", "4MiB", "--allow", f"{tmp_path}/", "--extent-bytes", str(EXTENT)]
    with (
        Daemon(tmp_path / "node", options) as one,
        Daemon(tmp_path / "node", options) as two,
        ThreadPoolExecutor(2) as pool,
    ):
        named = pool.map(pin, (one.socket_dir, two.socket_dir), (range(count), range(count, 2 * count)))
        expected = sorted(itertools.chain.from_iterable(named))
    assert sorted(json.loads((tmp_path / "node/state/pins.json").read_text())) == expected


@pytest.mark.slow
def test_the_budget_shrinks_for_files_of_others_and_grows_back(tmp_path: Path, data: bytes) -> None:
    with (
        mounted(tmp_path / "small", "size=8m") as disk,
        node(tmp_path, data, f"{disk}=80%") as found,
    ):
        found.fill()
        before = found.tier().budget_bytes
        theirs = os.urandom(5 << 20)
        (disk / "others").write_bytes(theirs)
        wait_until(
            lambda: len(stored(disk)) * EXTENT <= 3 << 20 and found.tier().budget_bytes < 3 << 20, 20.0
        )
        room = os.statvfs(disk)
        assert room.f_bavail >= SHARE_SPARE * room.f_blocks
        assert (disk / "others").read_bytes() == theirs

        def kinds() -> set[str]:
            return {event.kind for event in found.control.events(0.0)}

        def all_taken() -> bool:
            """Take what the cache has freed; return whether nothing is left."""
            with contextlib.suppress(OSError), (disk / "others").open("ab", buffering=0) as file:
                file.write(theirs)
            return "tier_taken" in kinds()

        wait_until(all_taken)
        assert found.tier().full
        (disk / "others").unlink()
        wait_until(lambda: found.tier().budget_bytes >= before * 0.95)
        assert "tier_room" in kinds()
        assert not found.tier().full
