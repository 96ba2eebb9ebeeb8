"""The first opening of a dataset of a million extents, and the end of its last job, while others are granted theirs."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from bench.node import Daemon
from cachesvc.catalog.build import Options
from cachesvc.client import Control
from cachesvc.grants import Granted
from cachesvc.leases import DaemonGrants
from tests.test_daemon import wait_until

EXTENT = 4096
MILLION = 1_000_000
PAUSE_S = 0.15
"""What a grant may wait. The daemon's loop gives way every 2 ms; the rest is a machine that others keep busy."""
RECORDS = Options(format="records", record_bytes=64, extent_bytes=EXTENT)


def granted(grants: DaemonGrants, index: int) -> float:
    """Seconds until an extent is granted."""
    began = time.perf_counter()
    (answer,) = grants.acquire([index], 60.0)
    took_s = time.perf_counter() - began
    assert isinstance(answer, Granted)
    os.close(answer.fd)
    grants.release([index])
    return took_s


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_dataset_of_a_million_extents_keeps_no_grant_waiting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, extents in (("small", 4), ("large", MILLION)):
        (tmp_path / name).mkdir()
        with open(tmp_path / name / "0.bin", "wb") as file:
            file.truncate(extents * EXTENT)
    waits: list[float] = []
    over = threading.Event()
    with (
        Daemon(tmp_path / "node", ["--ram", "1GiB", "--allow", f"{tmp_path}/"]) as daemon,
        Control(daemon.socket_dir) as control,
    ):
        small = DaemonGrants(daemon.socket_dir, control.open_dataset([f"{tmp_path}/small/"], RECORDS).id)
        granted(small, 0)

        def ask() -> None:
            while not over.is_set():
                waits.append(granted(small, 0))
                over.wait(0.001)

        asking = threading.Thread(target=ask)
        asking.start()
        began = time.monotonic()
        dataset = control.open_dataset([f"{tmp_path}/large/"], RECORDS)
        opened_s = time.monotonic() - began
        large = DaemonGrants(daemon.socket_dir, dataset.id)
        assert granted(large, MILLION - 1) < 60.0
        read_s = time.monotonic() - began - opened_s
        opening, began = len(waits), time.monotonic()
        large.close()
        wait_until(lambda: all(each.bound == 1 for each in control.status().datasets))
        left_s = time.monotonic() - began
        over.set()
        asking.join()
        with capsys.disabled():
            print(
                f"\n{dataset.extents:,} extents: catalog {opened_s:.1f} s, first extent {read_s:.1f} s later;"
                f" {len(waits):,} grants meanwhile, p99 {1e3 * sorted(waits)[-len(waits) // 100]:.1f} ms, the slowest"
                f" {1e3 * max(waits[:opening]):.0f} ms; given up {left_s:.1f} s after its last job's end, the slowest grant"
                f" meanwhile {1e3 * max(waits[opening:]):.0f} ms"
            )
        assert max(waits) < PAUSE_S
        small.close()
