"""Paths are resolved a step at a time, in mounts that may hang."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachesvc.catalog.options import Options
from cachesvc.core.errors import InvalidInput, NotAllowed, SourceUnavailable
from cachesvc.core.limits import LOOKUP_S
from cachesvc.daemon.access.path_lookups import THREADS_PER_MOUNT, Lookups, mount_points
from cachesvc.daemon.processes.jobs import BuildJob
from cachesvc.sources import links
from cachesvc.sources.uri import allowlist
from testbed import WAIT_S
from tests.support.waiting import wait_until

NAMES = st.sampled_from(["a", "b", "c", "..", ".", ""])
PATHS = st.lists(NAMES, min_size=1, max_size=4).map("/".join)
CALLERS = 16


@given(st.lists(st.tuples(PATHS, st.booleans(), PATHS), max_size=6), PATHS)
def test_a_path_resolves_as_the_system_resolves_it(made: list[tuple[str, bool, str]], path: str) -> None:
    with TemporaryDirectory() as root:
        for where, is_link, target in made:
            at = Path(f"{root}/{where}")
            if not os.path.realpath(at).startswith(f"{root}/"):  # make nothing outside
                continue
            try:
                if is_link:
                    at.symlink_to(f"{root}/{target}" if target.startswith("/") else target or ".")
                else:
                    at.mkdir()
            except OSError:  # the path exists, or its parent does not
                continue
        asked = f"{root}/{path}"
        try:
            expected = os.path.realpath(asked, strict=True)
        except OSError:
            expected = ""
        found = links.real(asked)
        assert found == expected or not expected
        assert found.startswith("/")
        assert os.path.exists(found) or not expected


def test_a_path_of_too_many_links_is_not_followed_at_all(tmp_path: Path) -> None:
    for number in range(links.MAX_LINKS + 1):
        (tmp_path / str(number)).symlink_to(str(number + 1))
    (tmp_path / str(links.MAX_LINKS + 1)).symlink_to("/etc")
    assert links.real(f"{tmp_path}/2/passwd") == "/etc/passwd"
    assert links.real(f"{tmp_path}/0/passwd") == f"{tmp_path}/0/passwd"
    with pytest.raises(OSError, match="Too many levels"):
        os.stat(f"{tmp_path}/0/passwd")


def test_links_that_change_during_a_lookup_raise_no_system_error(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    allowed = allowlist([f"{tmp_path}/in/"])
    over = threading.Event()

    def swap() -> None:
        while not over.is_set():
            (tmp_path / "in/new").symlink_to("/etc")
            (tmp_path / "in/new").rename(tmp_path / "in/link")
            (tmp_path / "in/link").unlink()

    swapping = threading.Thread(target=swap)
    swapping.start()
    try:
        for _ in range(3000):
            with suppress(NotAllowed):
                assert allowed.check(f"{tmp_path}/in/link/x") == f"file://{tmp_path}/in/link/x"
    finally:
        over.set()
        swapping.join()


class Mount:
    """A mount whose lookups below `path` wait until `go_on`."""

    def __init__(self, path: str) -> None:
        self.path, self.inside = path, 0
        self._free = threading.Event()

    def link(self, path: str) -> str:
        if path.startswith(self.path):
            self.inside += 1
            self._free.wait(WAIT_S)
            self.inside -= 1
        return ""

    def go_on(self) -> None:
        self._free.set()


def test_a_hung_mount_keeps_few_threads_and_delays_no_other_mount() -> None:
    now = [0.0]
    mount = Mount("/proc")
    lookups = Lookups(lambda: now[0], mount.link)
    before = threading.active_count()

    def ask(path: str) -> str:
        return lookups.run(lambda: links.real(path, lookups.follow), path)

    with ThreadPoolExecutor(THREADS_PER_MOUNT) as pool:
        first = [pool.submit(ask, "/proc/1") for _ in range(THREADS_PER_MOUNT)]
        wait_until(lambda: mount.inside == THREADS_PER_MOUNT)
        assert ask("/sys/kernel") == "/sys/kernel"
        now[0] += LOOKUP_S + 1
        for _ in range(CALLERS):
            with pytest.raises(SourceUnavailable, match=r"^/proc/self: .* hangs"):
                ask("/proc/self")
        for each in first:
            with pytest.raises(SourceUnavailable, match="look at the node"):
                each.result()
    assert ask("/sys/kernel") == "/sys/kernel"
    assert mount.inside == THREADS_PER_MOUNT
    mount.go_on()
    wait_until(lambda: threading.active_count() <= before)
    assert ask("/proc/1") == "/proc/1"


def test_run_raises_the_error_of_its_work() -> None:
    def fail() -> None:
        raise InvalidInput("no")

    with pytest.raises(InvalidInput, match=r"^no$"):
        Lookups().run(fail, "")


def test_a_prefix_with_a_rule_must_be_resolved() -> None:
    now = [0.0]
    mount = Mount("/proc")
    lookups = Lookups(lambda: now[0], mount.link)
    stuck = threading.Thread(target=lookups.follow, args=("/proc/1",))
    stuck.start()
    wait_until(lambda: mount.inside == 1)
    now[0] += LOOKUP_S + 1
    try:
        with pytest.raises(SourceUnavailable, match=r"^--allow /proc/a/: "):
            lookups.allowlist(["/proc/a/", "s3://b/"], exact=True)
        assert lookups.allowlist(["/proc/a/", "s3://b/"], exact=False).prefixes == (
            "file:///proc/a",
            "s3://b",
        )
    finally:
        mount.go_on()
        stuck.join()
    assert lookups.allowlist([], exact=True).prefixes is None


def test_mount_points_are_found_without_a_lookup() -> None:
    points = mount_points()
    assert {"/", "/proc"} <= points
    assert all(os.path.ismount(each) for each in points if each.startswith(("/proc", "/sys")))


def test_only_builds_that_read_a_hung_path_fail() -> None:
    def build(*uris: str) -> BuildJob:
        return BuildJob(list(uris), Options(), "", False)

    hung = "file:///mnt/nfs/set/0.bin"
    assert build("s3://b/", "file:///mnt/nfs/").reads(hung)
    assert build("file:///mnt/nfs/s*/{0..3}.bin").reads(hung)
    assert not build("s3://b/", "file:///mnt/disk/").reads(hung)
