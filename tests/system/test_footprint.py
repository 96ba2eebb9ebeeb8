"""The RAM budget leaves the daemon's processes their peak memory, which they give back."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from cachesvc.client.control import Control
from cachesvc.core.model import RAM, DatasetId
from cachesvc.daemon.fills.pool import TOGETHER_S, OomKills
from cachesvc.system.footprint import (
    DAEMON_BYTES,
    FILLER_BYTES,
    default_ram_bytes,
    footprint_bytes,
    largest_ram_bytes,
)
from cachesvc.system.memory import allowed_bytes, oom_kills
from loader import open_dataset
from testbed.servers import Fault, Proxy, SeaweedFS
from tests.support import datasets
from tests.support.cages import Cage, Caged, Hog, caged
from tests.support.meminfo import MEMINFO
from tests.support.waiting import wait_until

MIB = 1 << 20
LIMIT = 700 * MIB
KILLED = -9
V1 = {
    "proc/meminfo": MEMINFO.replace("16384", str(16 << 20)),
    "proc/self/cgroup": "5:cpu:/x\n4:memory:/docker/abc\n0::/\n",
    "cg/memory/memory.limit_in_bytes": LIMIT,
    "cg/memory/memory.usage_in_bytes": MIB,
    "cg/memory/memory.stat": "total_cache 0\ntotal_shmem 0\n",
    "cg/memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n",
}
V2 = {
    "proc/meminfo": V1["proc/meminfo"],
    "proc/self/cgroup": "0::/a/b\n",
    "cg/a/b/memory.max": LIMIT,
    "cg/a/b/memory.current": MIB,
    "cg/a/b/memory.stat": "file 0\nshmem 0\n",
    "cg/a/b/memory.events": "low 0\nhigh 0\nmax 9\noom 4\noom_kill 3\noom_group_kill 0\n",
    "cg/a/memory.events": "oom_kill 7\n",
}


@pytest.mark.parametrize("files", [V1, V2], ids=["v1", "v2"])
def test_budgets_and_kills_come_from_either_version_of_cgroups(
    tmp_path: Path, files: dict[str, object]
) -> None:
    datasets.write_files(tmp_path, {name: str(body).encode() for name, body in files.items()})
    allowed = allowed_bytes(tmp_path / "proc", tmp_path / "cg")
    assert allowed == LIMIT
    own = footprint_bytes(fillers=2, extent_bytes=16 * MIB)
    assert largest_ram_bytes(allowed, own) == LIMIT - LIMIT // 20 - own
    assert default_ram_bytes(allowed, own) == LIMIT // 10
    assert oom_kills(tmp_path / "proc", tmp_path / "cg") == 3


def test_the_default_is_no_more_than_the_largest_budget() -> None:
    assert default_ram_bytes(LIMIT, 650 * MIB) == largest_ram_bytes(LIMIT, 650 * MIB) == 15 * MIB
    assert default_ram_bytes(LIMIT, LIMIT) == 0


def test_where_no_cgroup_counts_kills_the_machine_does(tmp_path: Path) -> None:
    datasets.write_files(tmp_path, {"proc/self/cgroup": b"0::/\n", "proc/vmstat": b"nr_free 1\noom_kill 2\n"})
    assert oom_kills(tmp_path / "proc", tmp_path / "cg") == 2


def test_every_process_that_a_counted_kill_ended_was_killed_for_memory_and_no_other() -> None:
    count, now = 5, 0.0
    kills = OomKills(lambda: count, lambda: now)
    assert not kills.ended(KILLED), "an operator did it"
    count = 6
    assert not kills.ended(1)
    assert kills.ended(None), "it is about to be reaped"
    assert kills.ended(KILLED), "the process that it was forked from died, and it with that"
    now = TOGETHER_S
    assert not kills.ended(KILLED)


@pytest.fixture
def stored(s3_server: SeaweedFS, bucket: str) -> str:
    """512 MiB in S3."""
    client, body = s3_server.client(), os.urandom(MIB) * 64
    with ThreadPoolExecutor(4) as threads:
        for _ in threads.map(
            lambda number: client.put_object(Bucket=bucket, Key=f"data/{number}.bin", Body=body), range(8)
        ):
            pass
    return f"s3://{bucket}/data/"


def _largest(cage: Cage, *given: str) -> str:
    """The budget that `doctor` advises in the cage for one that is too large."""
    command = [sys.executable, "-m", "cachesvc", "doctor", "--json", "--ram", "650MiB", *given]
    out = subprocess.run(command, preexec_fn=cage.enter, stdout=subprocess.PIPE, check=False).stdout
    found = next(row for row in map(json.loads, out.splitlines()) if row["check"] == "memory")
    assert found["level"] == "warn"
    named = re.search("give --ram ([0-9]+MiB)", found["mend"])
    assert named
    return named[1]


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("fillers", [1, 2])
@pytest.mark.parametrize("given", ["named", "650MiB"])
def test_a_cold_fill_of_more_than_ram_kills_nothing_and_its_memory_is_given_back(
    tmp_path: Path,
    s3_env: dict[str, str],
    stored: str,
    monkeypatch: pytest.MonkeyPatch,
    fillers: int,
    given: str,
) -> None:
    with caged(LIMIT) as cage:
        largest = _largest(cage, "--fillers", str(fillers))
        ram = largest if given == "named" else given
        daemon = Caged(cage, tmp_path / "node", ["--ram", ram, "--fillers", str(fillers)], credentials=s3_env)
        monkeypatch.setenv("CACHESVC_SOCKET", daemon.socket_dir)
        with daemon, Control(daemon.socket_dir) as control:
            reader = open_dataset(stored, format="records", record_bytes=4096)
            peak = 0
            for progress in control.prefetch(DatasetId(reader.version)):  # noqa: B007
                peak = max(peak, cage.own_bytes())
            assert 0 < progress.resident_bytes < 512 * MIB
            assert cage.oom_kills() == 0
            assert peak <= footprint_bytes(fillers, 64 * MIB)
            assert (f"give --ram {largest}" in daemon.log) == (given != "named")
            assert ("the RAM tier shrinks" in daemon.log) == (given != "named")
            wait_until(lambda: cage.own_bytes() <= DAEMON_BYTES + fillers * FILLER_BYTES)
            reader.close()


def _grandchildren(cage: Cage, daemon: int) -> list[int]:
    """The pids of the fillers, which are children of the fork server."""
    parents = {}
    for pid in map(int, (cage.folder / "cgroup.procs").read_text().split()):
        parents[pid] = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return [pid for pid, parent in parents.items() if parents.get(parent) == daemon]


@pytest.mark.slow
def test_a_filler_killed_for_memory_is_logged_as_such(tmp_path: Path) -> None:
    with caged(300 * MIB) as cage:
        options = ["--ram", "16MiB", "--extent-bytes", "4MiB", "--fillers", "2", "--allow", f"{tmp_path}/"]
        with Caged(cage, tmp_path / "node", options) as daemon:
            assert daemon.process
            pid = daemon.pid
            wait_until(lambda: len(_grandchildren(cage, pid)) == 3)
            for each in _grandchildren(cage, pid):
                Path(f"/proc/{each}/oom_score_adj").write_text("1000")  # the kernel takes these before others
            with Hog(cage) as hog:
                hog.grow(280 * MIB)
                said = "a filler was killed by the kernel's OOM killer: lower --ram, or raise the cgroup's"
                wait_until(lambda: said in daemon.log)
                assert cage.oom_kills()


@pytest.mark.slow
@pytest.mark.alone
def test_a_prefetch_fills_into_nvme_what_ram_gives_up(
    tmp_path: Path,
    s3_server: SeaweedFS,
    s3_env: dict[str, str],
    bucket: str,
    proxy: Proxy,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """192 MiB fit into RAM at first; the source answers for the last extent once the RAM tier has shrunk to 128 MiB."""
    client, body = s3_server.client(), os.urandom(MIB) * 4
    for number in range(48):
        client.put_object(Bucket=bucket, Key=f"data/{number:02d}.bin", Body=body)
    (tmp_path / "nvme").mkdir()
    options = ["--ram", "200MiB", "--nvme", f"{tmp_path}/nvme=400MiB", "--extent-bytes", "4MiB"]
    last = Fault("hold", 1_000_000, "data/47.bin")
    proxy.faults.append(last)
    with caged(480 * MIB) as cage, Hog(cage) as hog, ExitStack() as ending:
        ending.callback(last.until.set)
        daemon = Caged(cage, tmp_path / "node", options, credentials=s3_server.env(proxy.endpoint))
        monkeypatch.setenv("CACHESVC_SOCKET", daemon.socket_dir)
        with daemon, Control(daemon.socket_dir) as control:

            def tier(name: str) -> Any:
                return next(each for each in control.status().tiers if each.name == name)

            reader = open_dataset(f"s3://{bucket}/data/", format="records", record_bytes=4096)
            for progress in control.prefetch(DatasetId(reader.version)):
                if tier(RAM).budget_bytes <= 128 * MIB:
                    last.until.set()
                elif progress.resident_bytes >= 180 * MIB or hog.size_bytes:
                    wait_until(lambda: cage.free_bytes() > 20 * MIB)
                    hog.grow(12 * MIB)
            reader.close()
            assert (progress.unfit_bytes, progress.resident_bytes) == (0, 192 * MIB)
            assert tier(RAM).used_bytes <= 128 * MIB
            assert tier("nvme0").used_bytes == 192 * MIB - tier(RAM).used_bytes
            assert cage.oom_kills() == 0
