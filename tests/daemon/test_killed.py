"""A daemon that is killed repeatedly while it fills, promotes and evicts: committed extents are there again."""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cachesvc.catalog.options import Options
from cachesvc.client.control import Control
from cachesvc.client.grants import DaemonGrants
from cachesvc.client.protocol import Granted
from cachesvc.core.errors import CacheError
from cachesvc.core.model import DatasetId
from testbed import WAIT_S
from testbed.node import Daemon
from tests.support.waiting import wait_until

EXTENT = 64 << 10
EXTENTS = 256
RECORDS = Options(format="records", record_bytes=4096)


def committed(nvme: Path) -> int:
    """Files under their final names, which serve as the index."""
    return sum(1 for _ in (nvme / "cachesvc-nvme/v1/extents").rglob("?" * 32 + ".*"))


def until_killed(work: Callable[[], None]) -> None:
    with contextlib.suppress(CacheError):
        while True:
            work()


def read_some(directory: str, dataset: DatasetId, data: bytes, wanted: list[int]) -> None:
    """Extents that the daemon grants; checks every byte."""
    with contextlib.closing(DaemonGrants(directory, dataset)) as grants:
        for answer in grants.acquire(wanted, WAIT_S):
            if isinstance(answer, Granted):
                found = os.pread(answer.fd, EXTENT, 0)
                os.close(answer.fd)
                assert found == data[answer.extent * EXTENT : (answer.extent + 1) * EXTENT]


def dies_at_work(daemon: Daemon, dataset: DatasetId, data: bytes, chance: random.Random) -> None:
    def fill() -> None:
        with Control(daemon.socket_dir) as control:
            list(control.prefetch(dataset))

    def evict() -> None:
        time.sleep(0.15)
        with Control(daemon.socket_dir) as control:
            control.evict(dataset)

    def read() -> None:
        read_some(daemon.socket_dir, dataset, data, chance.sample(range(EXTENTS), 8))

    with ThreadPoolExecutor() as pool:
        at_work = [pool.submit(until_killed, each) for each in (fill, evict, read)]
        time.sleep(chance.uniform(0.05, 0.6))
        daemon.kill()
        for each in at_work:
            each.result(WAIT_S)


@pytest.mark.slow
@pytest.mark.parametrize("kills", [2, pytest.param(24, marks=pytest.mark.timeout(600))])
def test_extents_that_a_killed_daemon_committed_are_granted_by_the_next(tmp_path: Path, kills: int) -> None:
    chance, data = random.Random(kills), os.urandom(EXTENTS * EXTENT)
    nvme = tmp_path / "nvme"
    for folder in (tmp_path / "data", nvme):
        folder.mkdir()
    (tmp_path / "data/0.bin").write_bytes(data)
    options = ["--ram", "1MiB", "--nvme", f"{nvme}=32MiB", "--extent-bytes", str(EXTENT)]
    kept = []
    with Daemon(tmp_path / "node", [*options, "--allow", f"{tmp_path}/"]) as daemon:
        for _ in range(kills):
            with Control(daemon.socket_dir) as control:
                dataset = control.open_dataset([f"{tmp_path}/data/"], RECORDS).id
            dies_at_work(daemon, dataset, data, chance)
            before = committed(nvme)
            daemon.start()
            kept.append(before)
            with Control(daemon.socket_dir) as control:
                on_disk = control.status().tiers[1]
                assert on_disk.used_bytes == before * EXTENT
                assert os.listdir(nvme / "cachesvc-nvme/v1/tmp") == []
                control.open_dataset([f"{tmp_path}/data/"], RECORDS)
                read_some(daemon.socket_dir, dataset, data, list(range(EXTENTS)))
                missing = (EXTENTS - before) * EXTENT
                wait_until(lambda: control.status().sources.bytes >= missing)  # noqa: B023
                time.sleep(1.1)  # fillers report once a second
                assert control.status().sources.bytes == missing, "what was there came from no source"
                assert sum(tier.corrupt_extents for tier in control.status().tiers) == 0
    if kills > 2:
        assert len(set(kept)) > 1, "kills met different moments"
