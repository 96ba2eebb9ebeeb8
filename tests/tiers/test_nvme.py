"""The NVMe directory: recovery, kill -9 at every point, full disks, damaged files."""

from __future__ import annotations

import fcntl
import os
import queue
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from importlib.machinery import PathFinder
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cachesvc.core.errors import CorruptData, InvalidInput, OutOfSpace, TierFailed
from cachesvc.core.model import ExtentId
from cachesvc.tiers import footer
from cachesvc.tiers.checksum import StreamedChecksums, verify
from cachesvc.tiers.nvme import NvmeTier, open_nvme
from testbed import WAIT_S
from tests.support.nvme import NAME, extent, files, opened, put


def final(directory: Path, number: int) -> Path:
    text = extent(number).hex()
    shelf = directory / "cachesvc-nvme/v1/extents" / text[:2]
    return next(shelf.glob(f"{text}.*"), shelf / text)


def test_commits_survive_and_garbage_does_not(tmp_path: Path) -> None:
    with opened(tmp_path) as (tier, _):
        for number in range(6):
            put(tier, number)
        tier.evict(extent(0))
    root = tmp_path / "cachesvc-nvme" / "v1"
    (root / "tmp" / "left").write_bytes(b"x")
    final(tmp_path, 77).write_bytes(b"no row")
    (root / "extents" / "00" / "stranger").write_bytes(b"no id")
    final(tmp_path, 1).unlink()
    os.truncate(final(tmp_path, 2), 3)
    with opened(tmp_path) as (tier, found):
        assert found == {extent(n): 5 for n in (2, 3, 4, 5)}
        assert files(tmp_path) == [extent(n).hex() for n in (2, 3, 4, 5)]
        with pytest.raises(CorruptData, match="filled again"):
            tier.open(extent(2))
        fd, checksums = tier.open(extent(3))
        assert checksums is not None
        verify(fd, checksums)
        os.close(fd)


def test_an_extent_is_readable_before_its_commit_and_through_it(tmp_path: Path) -> None:
    with opened(tmp_path) as (tier, _):
        writer = tier.reserve(extent(1), 4)
        os.pwrite(writer, b"data", 0)
        reader, checksums = tier.open(extent(1))
        assert checksums is None
        with pytest.raises(OSError):
            os.pwrite(reader, b"x", 0)
        tier.commit(extent(1), StreamedChecksums(4).checksums(writer))
        tier.evict(extent(1))
        assert os.pread(reader, 4, 0) == b"data"
        os.close(writer)
        os.close(reader)
    assert files(tmp_path) == []


@pytest.mark.parametrize("size", ["99999999999999", "9" * 200, "-5", str(2 << 30)])
def test_a_name_with_a_larger_size_than_its_file_is_garbage(tmp_path: Path, size: str) -> None:
    with opened(tmp_path) as (tier, _):
        put(tier, 1)
    Path(f"{final(tmp_path, 2)}.{size}").write_bytes(b"short")
    with opened(tmp_path) as (tier, found):
        assert found == {extent(1): 5}
        assert files(tmp_path) == [extent(1).hex()]


def test_an_extent_in_another_ones_folder_is_garbage(tmp_path: Path) -> None:
    with opened(tmp_path) as (tier, _):
        put(tier, 1)
    strange = "ff" + extent(1).hex()[2:]
    (final(tmp_path, 1).parent / f"{strange}.5").write_bytes(b"hello")
    with opened(tmp_path) as (tier, found):
        assert found == {extent(1): 5}, "a start must not count space that cannot be used"
        assert files(tmp_path) == [extent(1).hex()]


def test_a_large_extent_is_found_again(tmp_path: Path) -> None:
    size_bytes = (1 << 30) + 1
    open_nvme(NAME, tmp_path).close()
    path = Path(f"{final(tmp_path, 1)}.{size_bytes}")
    path.touch()
    os.truncate(path, size_bytes + footer.footer_bytes(size_bytes))
    with opened(tmp_path) as (_, found):
        assert found == {extent(1): size_bytes}


@pytest.mark.parametrize("removed", ["v1", "v1/tmp", "v1/extents", "v1/extents/00"])
def test_folders_that_somebody_removed_are_made_again(tmp_path: Path, removed: str) -> None:
    with opened(tmp_path) as (tier, _):
        put(tier, 1)
        tier.probe(thorough=True)
        shutil.rmtree(tmp_path / "cachesvc-nvme" / removed)
        put(tier, 2)
        tier.probe(thorough=True)
        writer = tier.reserve(extent(3), 5)
        os.pwrite(writer, b"three", 0)
        shutil.rmtree(tmp_path / "cachesvc-nvme" / "v1/extents")
        tier.commit(extent(3), StreamedChecksums(5).checksums(writer))
        os.close(writer)
        shutil.rmtree(tmp_path / "cachesvc-nvme" / "v1")
        tier.probe(thorough=True)
        put(tier, 4)
        with pytest.raises(TierFailed, match="removed behind"):
            tier.open(extent(3))
        tier.evict(extent(3))
    with opened(tmp_path) as (tier, found):
        assert found == {extent(4): 5}


@pytest.mark.parametrize("clean_up", [NvmeTier.abort, NvmeTier.evict])
def test_a_commit_that_failed_leaves_nothing_behind(
    tmp_path: Path, clean_up: Callable[[NvmeTier, ExtentId], None]
) -> None:
    with opened(tmp_path) as (tier, _):
        shelf = final(tmp_path, 1).parent
        shelf.rmdir()
        shelf.touch()
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(TierFailed, match="commit"):
            put(tier, 1)
        reader, _ = tier.open(extent(1))
        clean_up(tier, extent(1))
        assert os.pread(reader, 5, 0) == b"bytes"
        os.close(reader)
        shelf.unlink()
        shelf.mkdir()
        assert files(tmp_path) == []
        assert len(os.listdir("/proc/self/fd")) <= before
        put(tier, 1)


def test_a_footer_that_is_written_in_part_is_no_commit(tmp_path: Path) -> None:
    with opened(tmp_path) as (tier, _):
        fd = tier.reserve(extent(1), 4)
        os.pwrite(fd, b"data", 0)
        checksums = StreamedChecksums(4).checksums(fd)
        os.close(fd)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4 + 10, limits[1]))
        try:
            with pytest.raises(OutOfSpace, match="commit"):
                tier.commit(extent(1), checksums)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        tier.abort(extent(1))
        assert files(tmp_path) == []


def test_a_removed_file_is_a_tier_error_and_can_be_evicted(tmp_path: Path) -> None:
    with opened(tmp_path) as (tier, _):
        put(tier, 1)
        final(tmp_path, 1).unlink()
        with pytest.raises(TierFailed, match="behind the daemon's back"):
            tier.open(extent(1))
        tier.evict(extent(1))
        with pytest.raises(TierFailed):
            tier.open(extent(2))


def test_a_failed_removal_is_retried_unless_the_extent_is_stored_again(tmp_path: Path) -> None:
    with opened(tmp_path) as (tier, _):
        for number in (1, 2, 3):
            put(tier, number)
            there = final(tmp_path, number)
            kept = there.rename(tmp_path / "kept")
            there.mkdir()  # unlink fails, as on a disk with EIO
            with pytest.raises(TierFailed, match="cannot remove"):
                tier.evict(extent(number))
            there.rmdir()
            kept.rename(there)
        assert files(tmp_path) == [extent(3).hex()], "1 went when 2 was put, and 2 when 3 was"
        put(tier, 3)
        put(tier, 4)
        tier.evict(extent(4))
        assert files(tmp_path) == [extent(3).hex()]
        fd, _ = tier.open(extent(3))
        os.close(fd)


def test_a_folder_or_a_fifo_with_an_extents_name_stops_no_start(tmp_path: Path) -> None:
    with opened(tmp_path) as (tier, _):
        put(tier, 1)
    (tmp_path / "cachesvc-nvme/v1/tmp/folder").mkdir()
    pipe = Path(f"{final(tmp_path, 2)}.5")
    os.mkfifo(pipe)
    with opened(tmp_path) as (tier, found):
        assert found == {extent(1): 5, extent(2): 5}
        refused: list[bool] = []

        def open_it() -> None:
            with pytest.raises(TierFailed):
                tier.open(extent(2))
            refused.append(True)

        opening = threading.Thread(target=open_it, daemon=True)
        opening.start()
        opening.join(WAIT_S)
        assert refused
        tier.evict(extent(2))
        assert not pipe.exists()


@pytest.mark.parametrize("place", ["v1", "v1/tmp", "v1/extents", "v1/extents/ab"])
def test_a_file_in_the_place_of_a_folder_stops_no_start(tmp_path: Path, place: str) -> None:
    path = tmp_path / "cachesvc-nvme" / place
    path.parent.mkdir(parents=True)
    path.write_bytes(b"stray")
    with opened(tmp_path) as (tier, _):
        put(tier, 0xAB << 120)
    with opened(tmp_path) as (tier, found):
        assert found == {extent(0xAB << 120): 5}


def test_a_file_in_the_place_of_the_cache_directory_is_left_and_named(tmp_path: Path) -> None:
    (tmp_path / "cachesvc-nvme").write_bytes(b"somebody's")
    with pytest.raises(InvalidInput, match="is no directory; remove what lies there"):
        open_nvme(NAME, tmp_path)
    assert (tmp_path / "cachesvc-nvme").read_bytes() == b"somebody's"


def test_two_daemons_cannot_share_a_directory(tmp_path: Path) -> None:
    with opened(tmp_path), pytest.raises(InvalidInput, match="another cachesvc daemon"):
        open_nvme(NAME, tmp_path)
    open_nvme(NAME, tmp_path).close()
    with pytest.raises(InvalidInput, match="no directory"):
        open_nvme(NAME, tmp_path / "absent")


# A child counts its calls into C during a fill, an evict and a commit, and dies at the n-th, before or after it: so every
# point between two system calls is met. The interpreter starts once and forks for each.
CHILD = """
import os, signal, sys
from pathlib import Path
from cachesvc.core.model import ExtentId, TierName
from cachesvc.tiers.checksum import StreamedChecksums
from cachesvc.tiers.nvme import open_nvme

def play(directory, die_at):
    tier = open_nvme(TierName("nvme0"), Path(directory))
    tier.recover()
    def fill(number):
        fd = tier.reserve(ExtentId(bytes([number]) * 16), 5000)
        os.pwrite(fd, bytes([number]) * 5000, 0)
        sums = StreamedChecksums(5000).checksums(fd)
        os.close(fd)
        return sums
    tier.commit(ExtentId(bytes([1]) * 16), fill(1))
    tier.commit(ExtentId(bytes([2]) * 16), fill(2))
    seen = 0
    def step(frame, event, what):
        nonlocal seen
        if event.startswith("c_"):
            seen += 1
            if seen == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.setprofile(step)
    sums = fill(3)
    tier.evict(ExtentId(bytes([1]) * 16))
    tier.commit(ExtentId(bytes([3]) * 16), sums)
    sys.setprofile(None)
    os._exit(0)

for line in sys.stdin:
    child = os.fork()
    if child == 0:
        play(sys.argv[1], int(line))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def test_kill_9_at_every_point_leaves_committed_extents_and_nothing_else(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CHILD, str(tmp_path)]
    outcomes: list[tuple[int, ...]] = []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        for point in range(1, 1000):
            child.stdin.write(f"{point}\n")
            child.stdin.flush()
            code = int(child.stdout.readline())
            outcomes.append(survivors(tmp_path))
            if code == 0:  # past the last point
                break
            assert code == -signal.SIGKILL
        child.stdin.close()
    assert code == 0, "more points than were tried"
    assert len(outcomes) > 50
    assert set(outcomes) == {(1, 2), (2,), (2, 3)}
    assert outcomes == sorted(outcomes), "each state follows the one before, as the events are numbered"


def survivors(directory: Path) -> tuple[int, ...]:
    """Recover the tier, and return its extents; check every byte, and that the disk has no other file."""
    with opened(directory) as (tier, found):
        for resident in found:
            fd, checksums = tier.open(resident)
            assert checksums is not None
            verify(fd, checksums)
            assert os.pread(fd, 5000, 0) == resident[:1] * 5000
            os.close(fd)
        assert files(directory) == sorted(resident.hex() for resident in found)
        for resident in found:
            tier.evict(resident)
    return tuple(sorted(resident[0] for resident in found))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    command = ["mount", "-t", "tmpfs", "-o", "size=3m", "none", str(tmp_path)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("NOT TESTED: a full disk needs root and the right to mount a tmpfs")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_full_disk_refuses_the_reservation_and_keeps_the_rest(small_disk: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with opened(small_disk) as (tier, _):
        put(tier, 1, bytes(1 << 20))
        with pytest.raises(OutOfSpace, match="free space there"):
            tier.reserve(extent(2), 4 << 20)
        assert files(small_disk) == [extent(1).hex()]
        put(tier, 2, bytes(1 << 20))
    with opened(small_disk) as (tier, found):
        assert len(found) == 2
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_read_only_file_system_is_a_tier_error(small_disk: Path) -> None:
    with opened(small_disk) as (tier, _):
        put(tier, 1)
        subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
        with pytest.raises(TierFailed, match="read-only"):
            tier.reserve(extent(2), 10)
        fd, _ = tier.open(extent(1))
        os.close(fd)


@given(data=st.data())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_after_any_damage_the_tier_starts_and_serves_no_wrong_byte(
    tmp_path: Path, data: st.DataObject
) -> None:
    """Every file may be damaged anywhere, cut or lengthened, and other files may lie in the directory."""
    directory = tmp_path / str(len(os.listdir(tmp_path)))
    directory.mkdir()
    with opened(directory) as (tier, _):
        for number in range(3):
            put(tier, number, bytes([number]) * 300)
    path = final(directory, 1)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    path.chmod(0o600)
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))] + data.draw(st.binary(max_size=50)))
    with opened(directory) as (tier, found):
        assert {resident for resident in found} >= {extent(0), extent(2)}
        for resident in found:
            try:
                fd, checksums = tier.open(resident)
            except CorruptData:
                assert resident == extent(1)
                continue
            assert checksums is not None
            try:
                verify(fd, checksums)
                assert os.pread(fd, checksums.size_bytes, 0) == resident[-1:] * 300
            except CorruptData:
                assert resident == extent(1)
            finally:
                os.close(fd)


def test_a_file_under_another_extents_name_is_not_that_extent(tmp_path: Path) -> None:
    with opened(tmp_path) as (tier, _):
        put(tier, 1)
        path = final(tmp_path, 1)
        os.rename(path, path.with_name(path.name.replace(extent(1).hex(), extent(2).hex())))
    with opened(tmp_path) as (tier, _), pytest.raises(CorruptData, match="filled again"):
        tier.open(extent(2))


def test_commits_beside_evictions_and_reads_lose_nothing(tmp_path: Path) -> None:
    with opened(tmp_path) as (tier, _):
        written: queue.Queue[int | None] = queue.Queue()

        def commits() -> None:
            for number in range(300):
                put(tier, number)
                written.put(number)
            written.put(None)

        committing = threading.Thread(target=commits)
        committing.start()
        while (number := written.get()) is not None:
            fd, checksums = tier.open(extent(number))
            os.close(fd)
            assert checksums is not None
            if number % 3:
                tier.evict(extent(number))
        committing.join()
    with opened(tmp_path) as (tier, found):
        assert found == {extent(number): 5 for number in range(0, 300, 3)}


def test_the_directory_lock_does_not_outlive_its_tier_in_children(tmp_path: Path) -> None:
    tier = open_nvme(NAME, tmp_path)
    lock = os.open(tmp_path / "cachesvc-nvme", os.O_RDONLY)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        tier.close()
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(lock)
        child.communicate(b"")


def test_nothing_beside_a_script_in_the_directory_is_imported_for_the_package(tmp_path: Path) -> None:
    tier = open_nvme(NAME, tmp_path)
    put(tier, 1)
    tier.close()
    for package in ("cachesvc", "loader"):  # an editable install is found only after the folder of the script
        assert PathFinder.find_spec(package, [str(tmp_path)]) is None
