"""Work on a dataset of a million extents delays no grant of another: its first opening, plans that do not fit, pin,
eviction, unpin, the end of its last job, and the closing of its catalog."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from cachesvc.catalog.options import Options
from cachesvc.client.control import Control
from cachesvc.client.grants import DaemonGrants
from cachesvc.core.model import DatasetId
from cachesvc.core.order.epoch_order import Plan
from cachesvc.daemon.datasets import MAX_UNUSED
from testbed.node import Daemon
from tests.support.reading import granted
from tests.support.waiting import wait_until

EXTENT = 4096
MILLION = 1_000_000
PAUSE_S = 0.15
"""The longest wait of a grant. The loop takes other work every 2 ms; the rest allows for a busy machine."""
RECORDS = Options(format="records", record_bytes=64, extent_bytes=EXTENT)


def wait_of(grants: DaemonGrants, index: int) -> float:
    """Acquire and release an extent; return the seconds until it is granted."""
    began = time.perf_counter()
    answer = granted(grants, index, 60.0)
    took_s = time.perf_counter() - began
    os.close(answer.fd)
    grants.release([index])
    return took_s


def ask(socket_dir: str, dataset: DatasetId, over: Connection) -> None:
    """Acquire an extent a thousand times a second until told to end; then send (end, duration) of each."""
    grants = DaemonGrants(socket_dir, dataset)
    waits = []
    while not over.poll(0.001):
        waits.append((time.monotonic(), wait_of(grants, 0)))
    grants.close()
    over.send(waits)


class Phases:
    """The spans of the phases of the test."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, float, float]] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.spans.append((name, began, time.monotonic()))

    def reports(self, waits: list[tuple[float, float]]) -> Iterator[tuple[str, float]]:
        """Yield a text for each phase, and the slowest grant during it, in seconds."""
        for name, began, ended in self.spans:
            slowest_s = max((took for at, took in waits if began - took <= at <= ended), default=0.0)
            yield f"{name} {ended - began:.1f} s, slowest grant {1e3 * slowest_s:.0f} ms", slowest_s


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(600)
def test_a_dataset_of_a_million_extents_keeps_no_grant_waiting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, extents in (("small", 4), ("large", MILLION)):
        (tmp_path / name).mkdir()
        with open(tmp_path / name / "0.bin", "wb") as file:
            file.truncate(extents * EXTENT)
    order, following = (np.random.default_rng(seed).permutation(MILLION) for seed in (1, 2))
    steps = np.arange(MILLION) // 8
    phase = Phases()
    with (
        Daemon(tmp_path / "node", ["--ram", "1GiB", "--allow", f"{tmp_path}/"]) as daemon,
        Control(daemon.socket_dir) as control,
    ):
        small = control.open_dataset([f"{tmp_path}/small/"], RECORDS).id
        over, told = multiprocessing.Pipe()
        # a process of its own: what this one does to send a plan is no wait for a grant
        asking = multiprocessing.get_context("spawn").Process(
            target=ask, args=(daemon.socket_dir, small, told)
        )
        asking.start()
        with phase("catalog"):
            dataset = control.open_dataset([f"{tmp_path}/large/"], RECORDS)
        large = DaemonGrants(daemon.socket_dir, dataset.id)
        with phase("first extent"):
            assert wait_of(large, MILLION - 1) < 60.0
        for name in ("plan", "another plan in its place"):
            with phase(name):
                large.submit(Plan(order, steps, steps + 8, following))
                wait_of(large, int(order[0]))
        for name, pinned in (("pin", True), ("eviction of what is pinned", None), ("unpin", False)):
            with phase(name):
                if pinned is None:
                    assert control.evict(dataset.id).evicted_bytes == 0
                else:
                    control.pin(dataset.id, pinned)
        with phase("eviction"):
            control.evict(dataset.id)
        with phase("end of the last job"):
            large.close()
            wait_until(lambda: all(each.bound in (0, 1) for each in control.status().datasets))
        control.evict(dataset.id)
        with phase("forgotten"):
            for number in range(MAX_UNUSED + 1):
                (tmp_path / f"{number}").mkdir()
                (tmp_path / f"{number}" / "0.bin").write_bytes(bytes(EXTENT))
                other = control.open_dataset([f"{tmp_path}/{number}/"], RECORDS)
                with closing(DaemonGrants(daemon.socket_dir, other.id)) as grants:
                    wait_of(grants, 0)
            assert dataset.id not in [each.dataset.id for each in control.list()]
        over.send(None)
        waits = over.recv()
        asking.join()
        rows = list(phase.reports(waits))
        with capsys.disabled():
            p99_s = sorted(took for _, took in waits)[-len(waits) // 100]
            print(
                f"\n{dataset.dataset.extents:,} extents; {len(waits):,} grants meanwhile, p99 {1e3 * p99_s:.1f} ms",
                *(row for row, _ in rows),
                sep="\n  ",
            )
        assert len(waits) > 1000
        assert max(slowest_s for _, slowest_s in rows) < PAUSE_S
