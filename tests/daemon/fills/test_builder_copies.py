"""Indexing reads data through the cache, and from the source where the cache has no room or cannot read."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cachesvc.catalog.options import Options
from cachesvc.client.control import Control
from cachesvc.client.grants import DaemonGrants
from cachesvc.client.protocol import Granted
from cachesvc.core.limits import HUNG_S
from testbed import WAIT_S
from testbed.node import Daemon
from tests.support import datasets
from tests.support.faults.faulty_disk import FaultyDisk
from tests.support.waiting import wait_until

MEMBERS, MEMBER_BYTES = 64, 128 << 10
EXTENT = 16 << 20


def options(tmp_path: Path, *more: str) -> list[str]:
    return ["--extent-bytes", str(EXTENT), "--allow", f"{tmp_path}/", *more]


def test_extents_without_room_in_any_tier_are_indexed_from_the_source(tmp_path: Path) -> None:
    datasets.tar_shards(tmp_path / "tar", 4, 4, MEMBER_BYTES)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/0.bin").write_bytes(os.urandom(EXTENT))
    with (
        Daemon(tmp_path / "node", options(tmp_path, "--ram", str(EXTENT))) as daemon,
        Control(daemon.socket_dir) as control,
    ):
        other = control.open_dataset([f"{tmp_path}/other/"], Options(format="records", record_bytes=4096)).id
        grants = DaemonGrants(daemon.socket_dir, other)
        (answer,) = grants.acquire([0], WAIT_S)
        assert isinstance(answer, Granted)
        assert control.open_dataset([f"{tmp_path}/tar/"], Options()).dataset.samples == 16
        os.close(answer.fd)
        grants.close()


@pytest.mark.slow
def test_a_copy_on_a_disk_that_hangs_delays_an_opening_by_half_a_minute(tmp_path: Path) -> None:
    datasets.tar_shards(tmp_path / "tar", 1, MEMBERS, MEMBER_BYTES)
    with (
        FaultyDisk(tmp_path) as disk,
        Daemon(tmp_path / "node", options(tmp_path, "--ram", "0", "--nvme", f"{disk.path}=64MiB")) as daemon,
        Control(daemon.socket_dir) as control,
        ThreadPoolExecutor(1) as pool,
    ):
        disk.behave("read 0.3")
        found = pool.submit(control.open_dataset, [f"{tmp_path}/tar/"], Options())
        wait_until(lambda: control.status().tiers[0].used_bytes > 0)
        wait_until(lambda: not control.status().fills_running)
        time.sleep(2.0)  # a member takes 0.3 s, so the builder is in the middle of the copy
        disk.behave("hang")
        began = time.monotonic()
        try:
            assert found.result(3 * HUNG_S).dataset.samples == MEMBERS
            assert time.monotonic() - began < HUNG_S + 15.0
            assert "a source hangs; this process ends" in daemon.log
        finally:
            disk.behave("")
