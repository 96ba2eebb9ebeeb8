"""Faults of NFS and other file systems: stale handles, errors, replaced files, mounts that hang."""

from __future__ import annotations

import errno
import os
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachesvc.core.errors import InvalidInput, NotAllowed, NotFound, SourceChanged, SourceUnavailable
from cachesvc.core.limits import HUNG_S
from cachesvc.sources.file_attributes import stat_from_server
from cachesvc.sources.files import FilesSource
from cachesvc.sources.resilient import Resilience, Resilient
from cachesvc.sources.watched import CallWatch
from tests.support.clock import Clock
from tests.support.faults.fuse import FaultyMount, File
from tests.support.reads import read
from tests.support.users import ALICE, as_root, as_user

DATA = os.urandom(300_000)
needs_fuse = pytest.mark.skipif(bool(FaultyMount.why_not()), reason=FaultyMount.why_not())


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[FaultyMount]:
    with FaultyMount(tmp_path / "nfs", {"x": File(DATA)}) as found:
        yield found


def test_attributes_from_the_server_are_those_of_fstat(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(DATA)
    with open(tmp_path / "x", "rb") as file:
        ours, theirs = stat_from_server(file.fileno()), os.fstat(file.fileno())
    for name in ("st_mode", "st_size", "st_mtime_ns", "st_ctime_ns"):
        assert getattr(ours, name) == getattr(theirs, name)


@needs_fuse
def test_a_file_is_read_through_the_mount(mount: FaultyMount) -> None:
    source = FilesSource()
    (version,) = source.list(f"file://{mount.path}/")
    assert read(source, version) == DATA


@needs_fuse
@pytest.mark.parametrize("code", [errno.EIO, errno.ETIMEDOUT])
def test_an_error_of_the_server_is_tried_again(mount: FaultyMount, code: int) -> None:
    version = FilesSource().head(f"file://{mount.path}/x")
    mount.files["x"].fail, mount.files["x"].times = code, 2
    with pytest.raises(SourceUnavailable, match=os.strerror(code)):
        read(FilesSource(), version)
    patient = Resilient(FilesSource(), Resilience(), clock := Clock(), sleep=clock.sleep)
    assert read(patient, version) == DATA
    assert patient.counters.retries == 1


@needs_fuse
@pytest.mark.parametrize("at_open", [True, False])
def test_a_stale_handle_is_opened_again_and_a_stale_mount_is_unavailable(
    mount: FaultyMount, at_open: bool
) -> None:
    version = FilesSource().head(f"file://{mount.path}/x")
    file = mount.files["x"]
    file.fail, file.times, file.at_open = errno.ESTALE, 1, at_open
    assert read(FilesSource(), version) == DATA
    file.times = 1000
    with pytest.raises(SourceUnavailable, match=r"[Ss]tale"):
        read(FilesSource(), version)


@needs_fuse
def test_a_change_that_the_attribute_cache_hides_is_seen(tmp_path: Path) -> None:
    with FaultyMount(tmp_path / "nfs", {"x": File(DATA)}, attributes_s=600) as mount:
        version = FilesSource().head(f"file://{mount.path}/x")
        mount.files["x"].write_while_read = DATA[::-1]  # of the same length
        with pytest.raises(SourceChanged, match="written to"):
            read(FilesSource(), version)


def test_a_file_replaced_while_it_is_read_gives_one_version_or_none(tmp_path: Path) -> None:
    path, other = tmp_path / "x", tmp_path / "y"
    path.write_bytes(DATA)
    version = FilesSource().head(f"file://{path}")
    stop = threading.Event()

    def replace() -> None:
        replaced = False
        while not replaced or not stop.is_set():  # at least once, even if this thread gets a core late
            other.write_bytes(DATA[::-1])
            os.rename(other, path)
            replaced = True

    replacing = threading.Thread(target=replace)
    replacing.start()
    try:
        for _ in range(50):
            try:
                assert read(FilesSource(), version) == DATA
            except SourceChanged:
                pass
    finally:
        stop.set()
        replacing.join()
    with pytest.raises(SourceChanged):
        read(FilesSource(), version)


def test_a_change_of_the_mode_is_not_called_a_write(tmp_path: Path) -> None:
    file = tmp_path / "x"
    file.write_bytes(DATA)
    source = FilesSource()
    version, before = source.head(f"file://{file}"), file.stat()
    file.chmod(0o600)
    with pytest.raises(
        SourceChanged, match=r"only the ctime .* mode, owner or links .* open the dataset again"
    ):
        read(source, version)
    assert read(source, source.head(f"file://{file}")) == DATA
    version = source.head(f"file://{file}")
    file.write_bytes(DATA[::-1])
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(SourceChanged, match="its mtime set back"):
        read(source, version)


def test_a_file_that_became_a_fifo_is_a_typed_error_at_once(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"data")
    version = FilesSource().head(f"file://{path}")
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(SourceChanged, match="no longer a regular file"):
        read(FilesSource(), version)
    with pytest.raises(NotFound, match="not a regular file"):
        FilesSource().head(f"file://{path}")
    assert list(FilesSource().list(f"file://{tmp_path}/")) == []


def test_a_link_out_of_the_root_is_refused_also_when_it_came_later(tmp_path: Path) -> None:
    root, secret = tmp_path / "root", tmp_path / "secret"
    root.mkdir()
    secret.write_bytes(b"data")
    (root / "x").write_bytes(b"data")
    source = FilesSource((str(root),))
    version = source.head(f"file://{root}/x")
    (root / "x").unlink()
    (root / "x").symlink_to(secret)
    with pytest.raises(NotAllowed, match="leads outside"):
        read(source, version)


def test_a_call_that_takes_too_long_is_named() -> None:
    now = [0.0]
    calls = CallWatch(lambda: now[0])
    with calls.watching("file:///slow"):
        now[0] = 29
        assert calls.hung_uri() == ""
        now[0] = 31
        assert calls.hung_uri() == "file:///slow"
        calls.heartbeat()
        assert calls.hung_uri() == "", "it takes long, but comes along"
        now[0] = 62
        assert calls.hung_uri() == "file:///slow"
    calls.heartbeat()
    assert calls.hung_uri() == ""


def test_a_process_that_was_stopped_reports_no_hung_call() -> None:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds + late_s

    calls, late_s = CallWatch(lambda: now[0]), 40.0
    with calls.watching("file:///x"):
        assert calls.hung_after(1.0, sleep) == ""
        assert calls.hung_after(HUNG_S - 2.0, sleep) == ""
        assert calls.hung_after(2.0, sleep) == "file:///x", "it had as long as ever while the process ran"


def test_a_listing_reports_its_progress(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").write_bytes(DATA)
    steps = []
    source = FilesSource(heartbeat=lambda: steps.append(""))
    assert len(list(source.list(f"file://{tmp_path}/"))) == 3
    assert len(steps) == 4 + 6  # folders, and their entries


@pytest.mark.parametrize("gone", ["b", "d"])
def test_entries_removed_during_a_listing_are_left_out(tmp_path: Path, gone: str) -> None:
    for name in ("a", "b", "c", "d/x"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    listed = FilesSource().list(str(tmp_path))
    assert next(listed).uri.endswith("/a")
    subprocess.run(["rm", "-r", tmp_path / gone], check=True)
    left = {"b": ["/c", "/d/x"], "d": ["/b", "/c"]}[gone]
    assert [found.uri.removeprefix(f"file://{tmp_path}") for found in listed] == left


@pytest.mark.parametrize("instead", ["file", "link"])
def test_a_folder_that_becomes_something_else_while_it_is_listed_is_left_out(
    tmp_path: Path, instead: str
) -> None:
    for name in ("a", "d/x", "e"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    listed = FilesSource().list(str(tmp_path))
    assert next(listed).uri.endswith("/a")
    subprocess.run(["rm", "-r", tmp_path / "d"], check=True)
    (tmp_path / "d").write_bytes(b"x") if instead == "file" else (tmp_path / "d").symlink_to(".")
    assert [found.uri.removeprefix(f"file://{tmp_path}") for found in listed] == ["/e"]


def test_cyclic_and_dangling_links_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x")
    (tmp_path / "self").symlink_to("self")
    (tmp_path / "ring").symlink_to("other")
    (tmp_path / "other").symlink_to("ring")
    (tmp_path / "nowhere").symlink_to("gone")
    assert [found.uri for found in FilesSource().list(str(tmp_path))] == [f"file://{tmp_path}/a"]


@pytest.mark.parametrize(("deep", "fits"), [(400, True), (1500, False)])
def test_folders_nested_too_deep_are_a_typed_error(tmp_path: Path, deep: int, fits: bool) -> None:
    folder = os.open(tmp_path, os.O_RDONLY)
    for _ in range(deep):
        os.mkdir("d", dir_fd=folder)
        inner = os.open("d", os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = inner
    os.close(os.open("x", os.O_CREAT | os.O_WRONLY, dir_fd=folder))
    os.close(folder)
    try:
        if fits:
            assert len(list(FilesSource().list(str(tmp_path)))) == 1
        else:
            with pytest.raises(InvalidInput, match="deep in one another"):
                list(FilesSource().list(str(tmp_path)))
    finally:
        subprocess.run(["rm", "-rf", tmp_path / "d"], check=True)


@pytest.mark.parametrize("name", [".snapshot", "lost+found", "Lost+Found", "@eaDir", "__MACOSX"])
def test_an_ignored_folder_is_not_opened(tmp_path: Path, name: str) -> None:
    for folder in (tmp_path / name, tmp_path / "d" / name):
        folder.mkdir(parents=True)
        for number in range(50):
            (folder / str(number)).write_bytes(b"x")
    (tmp_path / "d/a").write_bytes(b"x")
    steps: list[None] = []
    found = [each.uri for each in FilesSource(heartbeat=lambda: steps.append(None)).list(str(tmp_path))]
    named = [] if name.startswith(".") else [f"file://{tmp_path}/{name}/", f"file://{tmp_path}/d/{name}/"]
    assert sorted(found) == sorted([f"file://{tmp_path}/d/a", *named])
    assert len(steps) < 10
    assert len(list(FilesSource().list(f"{tmp_path}/{name}"))) == 50, (
        "the ignored name is the root of this listing"
    )


@as_root
def test_an_unreadable_folder_is_an_error_unless_it_is_ignored() -> None:
    with tempfile.TemporaryDirectory() as here:
        Path(here).chmod(0o755)
        Path(here, "a").write_bytes(b"x")
        for name in ("lost+found", ".snapshot"):
            Path(here, name).mkdir(mode=0o700)
        Path(here, ".link").symlink_to("lost+found/gone")

        def listed() -> list[str]:
            return [each.uri for each in FilesSource().list(here)]

        assert as_user(ALICE, listed) == [f"file://{here}/a", f"file://{here}/lost+found/"]
        Path(here, "b/secret").mkdir(parents=True)
        Path(here, "b/secret").chmod(0o700)
        why = f"file://{here}/b/secret: permission denied to user {ALICE}"
        assert as_user(ALICE, listed) == ["NotAllowed", why]
