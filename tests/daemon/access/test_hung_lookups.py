"""A mount that hangs in lookups fails the calls about it, and nothing else of the daemon."""

from __future__ import annotations

import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cachesvc.cli.doctor_checks import Level, settings
from cachesvc.client.control import Control
from cachesvc.config import Settings
from cachesvc.core.errors import SourceUnavailable
from cachesvc.daemon.access.path_lookups import THREADS_PER_MOUNT
from testbed import WAIT_S
from testbed.node import Daemon
from tests.support.faults.fuse import FaultyMount, File
from tests.support.faults.outages import EXTENT, RECORDS, extent, needs_fuse
from tests.support.processes import children, threads_in_fuse
from tests.support.waiting import wait_until

CALLERS = 24


def opened(daemon: Daemon, uri: str) -> str:
    """Open a dataset; return the error, "" without one."""
    with Control(daemon.socket_dir) as control:
        try:
            control.open_dataset([uri], RECORDS)
        except SourceUnavailable as error:
            return str(error)
    return ""


@needs_fuse
@pytest.mark.slow
def test_a_mount_that_hangs_in_lookups_stops_only_what_is_about_it(tmp_path: Path) -> None:
    data = [random.Random(seed).randbytes(EXTENT) for seed in range(4)]
    for number in (0, 1):
        (tmp_path / f"disk{number}").mkdir()
        (tmp_path / f"disk{number}/0.bin").write_bytes(data[number])
    (tmp_path / "elsewhere").symlink_to(tmp_path / "nfs")
    nfs = f"{tmp_path}/nfs/"
    options = ["--ram", "32MiB", "--extent-bytes", str(EXTENT), "--fillers", "1"]
    allowed = [nfs, f"{tmp_path}/"]
    with (
        FaultyMount(tmp_path / "nfs", {"0.bin": File(data[2]), "1.bin": File(data[3])}) as mount,
        Daemon(tmp_path / "node", [*options, *(f"--allow={each}" for each in allowed)]) as daemon,
    ):
        assert daemon.process is not None
        pid = daemon.pid
        assert extent(daemon, f"{tmp_path}/disk0/") == data[0]
        mount.lookups_hang = True
        with ThreadPoolExecutor(CALLERS) as pool:
            uris = [nfs, f"{tmp_path}/elsewhere/"] * (CALLERS // 2)
            calls = [pool.submit(opened, daemon, uri) for uri in uris]
            assert mount.hung.wait(WAIT_S)
            for child in children(pid):  # fillers and builder restart while it hangs
                os.kill(child, 9)
            assert extent(daemon, f"{tmp_path}/disk1/", timeout_s=WAIT_S) == data[1]
            answers = [call.result(WAIT_S) for call in calls]
        assert all("hangs" in answer and answer.startswith(str(tmp_path)) for answer in answers), answers
        before = threads_in_fuse(pid)
        assert "hangs" in opened(daemon, nfs)
        assert 0 < threads_in_fuse(pid) <= before <= THREADS_PER_MOUNT, (
            "no further thread enters a mount that is known to hang"
        )
        found = settings(Settings(64 << 20, (), (nfs,), str(tmp_path), str(tmp_path)))
        assert (found.level, "hangs" in found.text) == (Level.FAIL, True), "doctor reports it"
        assert extent(daemon, f"{tmp_path}/disk0/", timeout_s=WAIT_S) == data[0]
        mount.go_on()
        wait_until(lambda: not opened(daemon, nfs))
        assert [extent(daemon, nfs, each) for each in (0, 1)] == data[2:]
        wait_until(lambda: not threads_in_fuse(pid))
        assert "Traceback" not in daemon.log


@pytest.mark.slow
@needs_fuse
def test_a_daemon_starts_while_a_mount_hangs(tmp_path: Path) -> None:
    data = random.Random(5).randbytes(EXTENT)
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk/0.bin").write_bytes(data)
    allow = [f"--allow={tmp_path}/{each}/" for each in ("nfs", "disk")]
    options = ["--ram", "32MiB", "--extent-bytes", str(EXTENT), "--fillers", "1"]
    with FaultyMount(tmp_path / "nfs", {"0.bin": File(data[::-1])}) as mount:
        mount.lookups_hang = True
        with Daemon(tmp_path / "node", [*options, *allow]) as daemon:
            assert extent(daemon, f"{tmp_path}/disk/", timeout_s=WAIT_S) == data
            assert "hangs" in opened(daemon, f"{tmp_path}/nfs/")
            mount.go_on()
            wait_until(lambda: not opened(daemon, f"{tmp_path}/nfs/"))
            assert extent(daemon, f"{tmp_path}/nfs/") == data[::-1]


@pytest.mark.slow
@needs_fuse
def test_a_listing_that_hangs_fails_alone(tmp_path: Path) -> None:
    """The kernel caches the mount's root, so the lookup succeeds; the builder then hangs in the folder."""
    data = random.Random(5).randbytes(EXTENT)
    for name in ("disk", "late"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "0.bin").write_bytes(data)
    options = ["--ram", "32MiB", "--extent-bytes", str(EXTENT), "--allow", f"{tmp_path}/"]
    with (
        FaultyMount(tmp_path / "nfs", {"0.bin": File(data)}, attributes_s=600) as mount,
        Daemon(tmp_path / "node", options) as daemon,
        ThreadPoolExecutor(2) as pool,
    ):
        assert not opened(daemon, f"{tmp_path}/nfs/")
        mount.lookups_hang = True
        hangs = pool.submit(opened, daemon, f"{tmp_path}/nfs/")
        assert mount.hung.wait(WAIT_S)
        assert extent(daemon, f"{tmp_path}/disk/", timeout_s=WAIT_S) == data
        assert "hangs" in hangs.result(WAIT_S)
        assert extent(daemon, f"{tmp_path}/late/", timeout_s=WAIT_S) == data
        mount.go_on()
        assert not opened(daemon, f"{tmp_path}/nfs/")
