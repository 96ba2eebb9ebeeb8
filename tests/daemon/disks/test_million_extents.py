"""A start over a million cached extents: soon, in little memory, and the extents are granted."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from cachesvc.catalog.options import Options
from cachesvc.client.control import Control
from cachesvc.client.grants import DaemonGrants
from cachesvc.core.model import ExtentId
from testbed.held import held
from testbed.node import Daemon
from tests.support.reading import contents, granted
from tests.support.waiting import wait_until

EXTENT = 4096
EXTENTS = 16
MILLION = 1_000_000
READY_S = 300.0
START_S = 10.0
"""Wall-clock seconds of the start, without waits for a core."""
SCANS = 8.0
"""The CPU time of the start, in plain listings of the same directory: measured 3 to 5."""
BYTES_EACH = 400
"""Bytes of memory for an extent that no dataset names: measured 290."""


def spread(extents: Path) -> None:
    """Make a million committed extents that are names only: a start looks at nothing else of them."""
    chance = random.Random(3)
    extent_folders = [os.open(extents / f"{number:02x}", os.O_DIRECTORY) for number in range(256)]
    for _ in range(MILLION):
        extent = ExtentId(chance.randbytes(16))
        flags = os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC
        os.close(os.open(f"{extent.hex()}.{EXTENT}", flags, 0o400, dir_fd=extent_folders[extent[0]]))
    for shelf in extent_folders:
        os.close(shelf)


def forgotten() -> str:
    """Drop the kernel's cached directories and inodes, as a reboot does, where this process may."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        return "warm: NOT TESTED with caches dropped, which needs root"
    return "caches dropped"


def cpu_of_a_listing(extents: Path) -> float:
    forgotten()
    before = time.process_time()
    found = sum(len(entry.name) > 32 for shelf in os.scandir(extents) for entry in os.scandir(shelf))
    assert found >= MILLION
    return time.process_time() - before


def cpu_of(pid: int) -> float:
    """CPU seconds that a process has used, without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def waited_for_a_core(pid: int) -> float:
    """Seconds for which a process's main thread waited for a core."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9


def started(daemon: Daemon) -> tuple[float, float, int]:
    """CPU seconds of a start, wall-clock seconds without waits for a core, and the memory after it in bytes."""
    began = time.monotonic()
    daemon.start()
    took_s = time.monotonic() - began
    assert daemon.process is not None
    took_s -= waited_for_a_core(daemon.pid)
    return cpu_of(daemon.pid), took_s, held(daemon.pid).rss_kb << 10


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(900)
def test_a_start_over_a_million_extents_costs_little_more_than_listing_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = random.Random(7).randbytes(EXTENTS * EXTENT)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/0.bin").write_bytes(data)
    nvme = tmp_path / "nvme"
    nvme.mkdir()
    options = [
        "--ram",
        "0",
        "--nvme",
        f"{nvme}=8GB",
        "--extent-bytes",
        str(EXTENT),
        "--allow",
        f"{tmp_path}/",
    ]
    options += ["--scrub-rate", "0"]  # a scrub would find that the extents are names only
    with Daemon(tmp_path / "node", options, ready_s=READY_S) as daemon:
        with Control(daemon.socket_dir) as control:
            dataset = control.open_dataset(
                [f"{tmp_path}/data/"], Options(format="records", record_bytes=64)
            ).id
            *_, last = control.prefetch(dataset)
            assert last.resident_extents == EXTENTS
        extents = nvme / "cachesvc-nvme/v1/extents"
        wait_until(lambda: sum(len(files) for *_, files in os.walk(extents)) == EXTENTS)
        daemon.stop()
        few_cpu_s, _, few_bytes = started(daemon)
        daemon.kill()
        spread(extents)
        scan_s = min(cpu_of_a_listing(extents) for _ in range(3))
        caches = forgotten()
        cpu_s, wall_s, rss_bytes = started(daemon)
        each_bytes = (rss_bytes - few_bytes) / MILLION
        with capsys.disabled():
            print(
                f"\n{MILLION:,} extents, {caches}: start {cpu_s:.1f} s of CPU ({few_cpu_s:.1f} s over {EXTENTS}),"
                f" {wall_s:.1f} s; a listing {scan_s:.1f} s of CPU; {rss_bytes >> 20} MiB, {each_bytes:.0f} bytes an extent"
            )
        assert cpu_s - few_cpu_s < SCANS * scan_s
        assert wall_s < START_S
        assert each_bytes < BYTES_EACH
        grants = DaemonGrants(daemon.socket_dir, dataset)
        for index in range(EXTENTS):
            found = contents(granted(grants, index, READY_S))
            assert found == data[index * EXTENT : (index + 1) * EXTENT]
        grants.close()
        with Control(daemon.socket_dir) as control:
            (tier,) = control.status().tiers
            assert tier.used_bytes == (MILLION + EXTENTS) * EXTENT
            assert tier.corrupt_extents == 0
