"""Catalogs unused for a month, or the longest unused beyond a limit, are removed; catalogs in use, or about to be, stay."""

from __future__ import annotations

import fcntl
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from cachesvc.catalog.expiry import FRESH_S, UNUSED_S, mark_used, remove_unused
from cachesvc.catalog.options import Options
from cachesvc.client.control import Control
from cachesvc.client.grants import DaemonGrants
from cachesvc.core.errors import OutOfSpace
from cachesvc.core.model import DatasetId
from testbed import WAIT_S
from testbed.node import Daemon
from tests.support.waiting import wait_until


def aged(path: Path, more_s: float = 1.0) -> Path:
    then = time.time() - UNUSED_S - more_s
    os.utime(path, (then, then))
    return path


def made(path: Path) -> Path:
    path.write_bytes(b"catalog")
    return path


def test_old_files_are_removed_and_young_or_kept_ones_stay(tmp_path: Path) -> None:
    for name in ("old.lmdb", "kept.lmdb", "old.lmdb.7.tmp"):
        aged(made(tmp_path / name))
    aged(made(tmp_path / "young.lmdb"), -60.0)
    (tmp_path / "lost+found").mkdir()
    aged(tmp_path / "lost+found")
    (tmp_path / "link.lmdb").symlink_to(aged(tmp_path / "kept.lmdb"))
    assert sorted(remove_unused(str(tmp_path), {"kept"})) == ["old.lmdb", "old.lmdb.7.tmp"]
    assert sorted(os.listdir(tmp_path)) == ["kept.lmdb", "link.lmdb", "lost+found", "young.lmdb"]
    assert remove_unused(str(tmp_path), set()) == [], "what was kept was used just now"


def test_a_catalog_about_to_be_opened_is_not_removed(tmp_path: Path) -> None:
    path = aged(made(tmp_path / "a.lmdb"))
    fd = os.open(path, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_SH)  # as `used`, in another process
    assert remove_unused(str(tmp_path), set()) == []
    os.close(fd)
    assert mark_used(str(path))
    assert remove_unused(str(tmp_path), set()) == []
    aged(path)
    assert remove_unused(str(tmp_path), set()) == ["a.lmdb"]
    assert not mark_used(str(path))


def test_marking_a_catalog_waits_for_its_removal_and_reports_it(tmp_path: Path) -> None:
    path = aged(made(tmp_path / "a.lmdb"))
    fd = os.open(path, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)  # as `remove_unused`, in another process
    found: list[bool] = []
    user = threading.Thread(target=lambda: found.append(mark_used(str(path))))
    user.start()
    user.join(0.2)
    assert found == []
    path.unlink()
    os.close(fd)
    user.join()
    assert found == [False]


@pytest.mark.parametrize("meanwhile", ["used", "built anew"])
def test_age_is_checked_again_before_removal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, meanwhile: str
) -> None:
    path, lock = aged(made(tmp_path / "a.lmdb")), fcntl.flock

    def locked(fd: int, how: int) -> None:
        """Change the file before it is locked, as another process may."""
        if meanwhile == "built anew":
            path.unlink()
            made(path)
        else:
            os.utime(path)
        lock(fd, how)

    monkeypatch.setattr(fcntl, "flock", locked)
    assert remove_unused(str(tmp_path), set()) == []
    assert path.exists()


def test_last_use_is_recorded_to_the_minute(tmp_path: Path) -> None:
    path = made(tmp_path / "a.lmdb")
    before = path.stat().st_mtime_ns
    assert mark_used(str(path))
    assert path.stat().st_mtime_ns == before
    aged(path)
    assert mark_used(str(path))
    assert path.stat().st_mtime_ns >= before


def test_the_longest_unused_catalogs_beyond_the_limit_are_removed(
    tmp_path: Path,
) -> None:
    for age, name in enumerate(("fresh.lmdb", "b.lmdb", "a.lmdb", "building.lmdb.7.tmp", "kept.lmdb")):
        (tmp_path / name).write_bytes(bytes(1 << 20))
        aged(tmp_path / name, age * (FRESH_S + 1.0) - UNUSED_S)
    assert remove_unused(str(tmp_path), {"kept"}, 3 << 20) == []
    assert remove_unused(str(tmp_path), {"kept"}, 2 << 20) == ["a.lmdb"]
    assert mark_used(str(tmp_path / "b.lmdb"))
    assert remove_unused(str(tmp_path), {"kept"}, 0) == [], "who found it may not have opened it yet"
    aged(tmp_path / "b.lmdb", FRESH_S + 1.0 - UNUSED_S)
    assert remove_unused(str(tmp_path), {"kept"}, 0) == ["b.lmdb"]
    assert sorted(os.listdir(tmp_path)) == ["building.lmdb.7.tmp", "fresh.lmdb", "kept.lmdb"]


@contextmanager
def small_disk(path: Path) -> Iterator[Path]:
    """Mount a file system of 16 MiB."""
    path.mkdir(parents=True)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "none", path], capture_output=True)
    if done.returncode:
        pytest.skip("NOT TESTED: mounting needs root")
    try:
        yield path
    finally:
        subprocess.run(["umount", path], check=True)


def test_unused_catalogs_leave_as_much_free_as_they_take(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        for number in range(12):
            (disk / f"{number:02}.lmdb").write_bytes(bytes(1 << 20))
            aged(disk / f"{number:02}.lmdb", 1000.0 - number - UNUSED_S)
        assert remove_unused(str(disk), set()) == ["00.lmdb", "01.lmdb", "02.lmdb", "03.lmdb"]


def test_a_disk_full_of_unused_catalogs_gets_room_for_another(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/0.bin").write_bytes(os.urandom(1 << 16))
    options = Options(format="records", record_bytes=64)
    with (
        small_disk(tmp_path / "node/state") as disk,
        Daemon(tmp_path / "node", ["--ram", "64MiB", "--allow", f"{tmp_path}/"]) as daemon,
        Control(daemon.socket_dir) as control,
    ):
        junk = [disk / f"catalogs/{number:032x}.lmdb" for number in range(17)]
        for each in junk:
            with suppress(OSError):  # the last one fills the disk
                each.write_bytes(bytes(1 << 20))
            aged(each, FRESH_S + 1.0 - UNUSED_S)
        with pytest.raises(OutOfSpace, match="No space left"):
            control.open_dataset([f"{tmp_path}/data/"], options)
        wait_until(lambda: not junk[6].exists())
        assert control.open_dataset([f"{tmp_path}/data/"], options).dataset.extents == 1
        daemon.stop()


@pytest.mark.slow
def test_a_daemon_removes_catalogs_unused_for_a_month(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/0.bin").write_bytes(os.urandom(1 << 16))
    catalogs = tmp_path / "node/state/catalogs"
    with Daemon(tmp_path / "node", ["--ram", "64MiB", "--allow", f"{tmp_path}/"]) as daemon:

        def opened(record_bytes: int) -> DatasetId:
            with Control(daemon.socket_dir) as control:
                options = Options(format="records", record_bytes=record_bytes)
                return control.open_dataset([f"{tmp_path}/data/"], options).id

        def stays(dataset: DatasetId) -> bool:
            return (catalogs / f"{dataset}.lmdb").exists()

        old, pinned, again, read, other = (opened(number) for number in (16, 32, 64, 128, 256))
        with Control(daemon.socket_dir) as control:
            control.pin(pinned, True)
        daemon.stop()
        for each in (old, pinned, again, other):
            aged(catalogs / f"{each}.lmdb")
        daemon.start()
        reader = DaemonGrants(daemon.socket_dir, read)
        reader.acquire([0], WAIT_S)
        aged(catalogs / f"{read}.lmdb")
        assert opened(64) == again
        wait_until(lambda: not stays(old))
        wait_until(lambda: not stays(other))
        assert stays(pinned)
        assert stays(again)
        assert stays(read), "a reader's dataset"
        reader.close()
        assert opened(16) == old, "whoever comes after all has it built anew"
        assert stays(old)
        assert "Traceback" not in daemon.log
