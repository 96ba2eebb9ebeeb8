"""A job that comes later gets its share of a cache that another job's readers hold, idle or reading on."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from cachesvc.client.control import Control
from loader import DataLoader, open_dataset
from testbed.forked import TRAINER, ForkedProcess
from testbed.node import Daemon
from tests.support.waiting import wait_until

RECORD, EXTENT, EXTENTS = 1024, 8192, 32
_FIRST = f"""
import sys, time
from loader import DataLoader, open_dataset
dataset = open_dataset(sys.argv[1], format="records", record_bytes={RECORD})
batches = DataLoader(dataset, batch_size=8, shuffle=True)
for _ in batches: pass
print("read", flush=True)
while sys.argv[2] == "at rest": time.sleep(1)
while True:
    for _ in batches: pass
"""


@pytest.fixture
def daemon(tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    for name, count in (("first", EXTENTS), ("second", 2 * EXTENTS)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "0.bin").write_bytes(np.random.default_rng(count).bytes(count * EXTENT))
    (tmp_path / "disk").mkdir()
    ram = "256KiB" if tier == "ram" else "0"
    options = ["--ram", ram, *(["--nvme", f"{tmp_path}/disk=256KiB"] if ram == "0" else [])]
    with Daemon(
        tmp_path / "node", [*options, "--extent-bytes", str(EXTENT), "--allow", str(tmp_path)]
    ) as found:
        monkeypatch.setenv("CACHESVC", "require")
        monkeypatch.setenv("CACHESVC_SOCKET", found.socket_dir)
        yield found


@contextmanager
def another_job(data: Path, how: str) -> Iterator[None]:
    """Run a job that has read all of its data, which fills the cache, and holds it."""
    command = [sys.executable, "-c", _FIRST, str(data), how]
    job = ForkedProcess(command, stdout=subprocess.PIPE, preloaded=TRAINER)
    assert job.stdout is not None
    try:
        assert job.stdout.readline() == "read\n"
        yield
        assert job.poll() is None
    finally:
        job.kill()
        job.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tier", "how", "restarted"),
    [
        ("nvme", "reading", False),
        ("ram", "at rest", True),
        ("ram", "at rest", False),
        ("ram", "reading", False),
        ("nvme", "at rest", False),
        ("nvme", "at rest", True),
    ],
)
def test_a_job_that_holds_the_whole_cache_gives_another_its_share(
    daemon: Daemon, tmp_path: Path, how: str, restarted: bool
) -> None:
    body = np.frombuffer((tmp_path / "second" / "0.bin").read_bytes(), np.uint8).reshape(-1, RECORD)
    dataset = open_dataset(tmp_path / "second", format="records", record_bytes=RECORD)
    with another_job(tmp_path / "first", how):
        if restarted:
            daemon.kill()
            daemon.start()
        batches = DataLoader(dataset, batch_size=8)

        def read_on() -> bool:
            for batch in batches:
                assert (batch.numpy() == body[batches.indices]).all()
            with Control(daemon.socket_dir) as control:
                found = next(each for each in control.list() if each.dataset.uri.endswith("second"))
            return found.kept_bytes >= EXTENTS // 4 * EXTENT

        wait_until(read_on)  # it waits for room that only another job can free
    dataset.close()


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["ram", "nvme"])
def test_loaders_of_one_thread_ask_each_other_for_room(daemon: Daemon, tmp_path: Path) -> None:
    first = open_dataset(tmp_path / "first", format="records", record_bytes=RECORD)
    second = open_dataset(tmp_path / "second", format="records", record_bytes=RECORD)
    for _ in range(2):
        for dataset in (first, second):
            assert sum(len(batch) for batch in DataLoader(dataset, batch_size=8)) == len(dataset)
    first.close()
    second.close()
