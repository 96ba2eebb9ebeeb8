"""A container's mount of a socket directory that was made anew on the host: no daemon can appear in it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachesvc.catalog.options import Options
from cachesvc.client.connection import Connection
from cachesvc.client.control import Control
from cachesvc.client.failover import FailoverGrants
from cachesvc.client.grants import DaemonGrants
from cachesvc.client.opening import open_by_policy
from cachesvc.core.errors import DaemonUnavailable
from cachesvc.core.model import DatasetId

WHY = "was removed outside of this container and made anew"


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """The mount of a directory that was removed and made again."""
    host, inside = tmp_path / "run", tmp_path / "container"
    host.mkdir()
    inside.mkdir()
    if os.geteuid() or subprocess.run(["mount", "--bind", host, inside]).returncode:
        pytest.skip("mounting takes root")
    host.rmdir()
    host.mkdir()
    yield inside
    subprocess.run(["umount", "-l", inside], check=True)


def test_a_job_that_requires_a_daemon_is_told_at_once(mounted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHESVC_SOCKET", str(mounted))
    monkeypatch.setenv("CACHESVC", "require")
    with pytest.raises(DaemonUnavailable, match=WHY) as told:
        open_by_policy(["s3://bucket/"], Options(), "", 1)
    assert told.value.for_good, "nothing waits for it"
    with pytest.raises(DaemonUnavailable, match=WHY):
        Control()
    with pytest.raises(DaemonUnavailable, match=WHY):
        Connection(f"{mounted}/grants.sock")


def test_a_read_does_not_wait_for_a_daemon_there(mounted: Path) -> None:
    grants = FailoverGrants(DaemonGrants(str(mounted), DatasetId("0" * 32)), None)
    with pytest.raises(DaemonUnavailable, match=WHY):
        grants.acquire([0], 300.0)
    grants.close()


def test_a_directory_without_a_daemon_is_worth_waiting_for(tmp_path: Path) -> None:
    with pytest.raises(DaemonUnavailable, match="start one: cachesvc serve") as told:
        Connection(f"{tmp_path}/grants.sock")
    assert not told.value.for_good
