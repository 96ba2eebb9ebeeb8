"""Unused catalogs are closed, and opened again for the next reader."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from cachesvc.catalog.options import Options
from cachesvc.client.control import Control
from cachesvc.client.grants import DaemonGrants
from cachesvc.client.protocol import Granted
from cachesvc.core.model import DatasetId
from cachesvc.daemon.datasets import MAX_UNUSED
from testbed import WAIT_S
from testbed.node import Daemon, open_files
from tests.support.reading import read_extent
from tests.support.waiting import wait_until

PAGE = 4096
PAGES = 96
OPENED = 40


@pytest.mark.slow
def test_openings_of_other_options_keep_few_files_open(tmp_path: Path) -> None:
    data = random.Random(7).randbytes(PAGES * PAGE)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/0.bin").write_bytes(data)
    options = ["--ram", "1MiB", "--allow", f"{tmp_path}/", "--extent-bytes", "64KiB"]

    with Daemon(tmp_path / "node", options) as daemon, Control(daemon.socket_dir) as control:
        assert daemon.process is not None
        pid = daemon.pid

        def opened(number: int) -> DatasetId:
            chosen = Options(format="records", record_bytes=PAGE, extent_bytes=PAGE * (number + 1))
            return control.open_dataset([f"{tmp_path}/data/"], chosen).id

        def reads(dataset: DatasetId) -> None:
            grants = DaemonGrants(daemon.socket_dir, dataset)
            assert data.startswith(read_extent(grants, 0))
            grants.close()

        first = opened(0)
        kept = DaemonGrants(daemon.socket_dir, first)
        (answer,) = kept.acquire([1], WAIT_S)
        second = opened(1)
        control.pin(second, True)
        reads(opened(2))  # one of its extents stays resident
        ids = [opened(number) for number in range(3, OPENED)]
        assert len(set(ids)) == OPENED - 3
        before = len(open_files(pid))
        for number in range(OPENED, 2 * OPENED):
            opened(number)
        wait_until(lambda: len(open_files(pid)) <= before + 2)  # an answered call closes its socket later
        assert sum("lmdb" in name for name in open_files(pid)) <= 2 * (MAX_UNUSED + 8)
        reads(ids[0])  # its catalog was closed
        (answer,) = kept.acquire([2], WAIT_S)
        assert isinstance(answer, Granted), "a reader's dataset stays"
        kept.close()
        *_, last = control.prefetch(second)
        assert last.resident_extents == last.extents
        control.evict(ids[1])
        *_, last = control.prefetch(ids[2])
        assert last.resident_extents == last.extents
        wait_until(lambda: control.status().readers <= 1)
        assert "Traceback" not in daemon.log
