"""The RAM tier shrinks before a trainer is killed for memory, and grows when memory is free again."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachesvc.client.control import Control
from cachesvc.client.grants import DaemonGrants
from cachesvc.client.protocol import Granted, Refused
from cachesvc.core.model import RAM, DatasetId
from cachesvc.daemon.disks.budgets import CALM_S, RamBudget
from cachesvc.system.memory import MEMORY_SPARE, Memory, memories
from loader import DataLoader, open_dataset
from tests.support import datasets
from tests.support.cages import Cage, Caged, Hog, caged
from tests.support.meminfo import MEMINFO
from tests.support.waiting import wait_until

MIB = 1 << 20


def tree(root: Path, files: Mapping[str, object]) -> list[Memory]:
    datasets.write_files(root, {name: str(body).encode() for name, body in files.items()})
    return memories(root / "proc", root / "cg")


def test_without_limits_only_the_machines_memory_counts(tmp_path: Path) -> None:
    plain = {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/\n", "cg/cgroup.procs": ""}
    assert tree(tmp_path, plain) == [Memory(16 * MIB, 8 * MIB)]


def test_each_cgroup_above_counts_and_clean_caches_are_free(tmp_path: Path) -> None:
    found = tree(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/system.slice/cachesvc.service\n",
            "cg/system.slice/memory.max": "max\n",
            "cg/system.slice/cachesvc.service/memory.max": f"{4 * MIB}\n",
            "cg/system.slice/cachesvc.service/memory.current": f"{3 * MIB}\n",
            "cg/system.slice/cachesvc.service/memory.stat": f"anon 9\nfile {2 * MIB}\nshmem {MIB}\n",
        },
    )
    assert found == [Memory(16 * MIB, 8 * MIB), Memory(4 * MIB, 2 * MIB)]


def test_cgroups_of_version_1_and_a_containers_view_of_them(tmp_path: Path) -> None:
    """/proc/self/cgroup names a folder that the container does not see; its own is the root."""
    found = tree(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "5:cpu:/x\n4:memory:/docker/abc\n0::/\n",
            "cg/memory/memory.limit_in_bytes": 2 * MIB,
            "cg/memory/memory.usage_in_bytes": 2 * MIB,
            "cg/memory/memory.stat": "cache 5\ntotal_cache 0\ntotal_shmem 0\n",
        },
    )
    assert found == [Memory(16 * MIB, 8 * MIB), Memory(2 * MIB, 0)]


@given(
    st.integers(0, 10_000),
    st.integers(0, 1_000),
    st.lists(
        st.tuples(st.integers(0, 10_000), st.integers(0, 10_000), st.integers(0, 500), st.integers(0, 90)),
        min_size=1,
    ),
)
def test_a_budget_is_the_memory_that_was_free_all_the_time(
    given_bytes: int, least_bytes: int, seen: list[tuple[int, int, int, int]]
) -> None:
    budget, now, past = RamBudget(given_bytes, least_bytes), 0.0, []
    least = min(given_bytes, least_bytes, int(10_000 * MEMORY_SPARE) // 2)
    for free, ours, fills, later in seen:
        now += later
        room = max(least, min(given_bytes, free + ours - fills - int(10_000 * MEMORY_SPARE)))
        past.append((now, room))
        found = budget.measured([Memory(20_000, 20_000), Memory(10_000, free)], ours, fills, now)
        assert found == min(room for at, room in past if at >= now - CALM_S)
        assert least <= found <= given_bytes


STEP, STEPS = 25 * MIB, 8


@pytest.fixture
def cage() -> Iterator[Cage]:
    with caged(608 * MIB) as found:
        yield found


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize(
    ("mapped", "pause_s"), [(False, 1.2), (True, 4.0)], ids=["at hand", "mapped by an idle reader"]
)
def test_a_trainer_that_grows_is_not_killed(
    tmp_path: Path, cage: Cage, monkeypatch: pytest.MonkeyPatch, mapped: bool, pause_s: float
) -> None:
    """400 MiB of cache in 608 MiB. A trainer then takes 200 MiB in steps smaller than the free memory, each once the
    memory is free again. The machine has enough memory, so a reader learns of the pressure only from the daemon."""
    (tmp_path / "data").mkdir()
    body = os.urandom(MIB) * 4
    for number in range(100):
        (tmp_path / f"data/{number:03d}.bin").write_bytes(body)
    options = ["--ram", "450MiB", "--extent-bytes", str(4 * MIB), "--allow", f"{tmp_path}/"]
    daemon = Caged(cage, tmp_path / "node", options)
    monkeypatch.setenv("CACHESVC_SOCKET", daemon.socket_dir)
    monkeypatch.setenv("CACHESVC", "require")
    with daemon, Control(daemon.socket_dir) as control:
        reader = open_dataset(f"{tmp_path}/data/", format="records", record_bytes=4096)
        dataset = DatasetId(reader.version)

        def ram(name: str) -> int:
            tier = next(tier for tier in control.status().tiers if tier.name == RAM)
            return int(getattr(tier, name))

        *_, filled = control.prefetch(dataset)
        before = ram("used_bytes")
        assert before == filled.resident_bytes == 400 * MIB
        for batch in DataLoader(reader, batch_size=1024) if mapped else ():
            assert batch.numpy()[0].tobytes() == body[:4096]
        with Hog(cage) as hog:
            for _ in range(STEPS):
                assert hog.grow(STEP)
                time.sleep(pause_s)
            assert ram("used_bytes") <= before - STEP * STEPS // 2
            assert "the RAM tier shrinks" in daemon.log
        assert daemon.process
        assert daemon.process.poll() is None
        grants = DaemonGrants(daemon.socket_dir, dataset)

        def granted() -> (
            bool
        ):  # the reader's mappings leave no room for another extent until they are recalled
            answers.extend(grants.acquire([0], 10.0))
            return isinstance(answers[-1], Granted)

        answers = list[Granted | Refused]()
        wait_until(granted)
        assert len(answers) == 1 or mapped
        answer = answers[-1]
        assert isinstance(answer, Granted)
        assert os.pread(answer.fd, 4096, 0) == body[:4096]
        os.close(answer.fd)
        grants.close()
        reader.close()
