"""Whole jobs, with killed daemons and trainers: a real S3 server behind a counting proxy, a daemon, trainers."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cachesvc.client.control import Control
from cachesvc.core.errors import DaemonUnavailable
from cachesvc.core.model import DatasetId
from loader import DataLoader, open_dataset
from testbed.node import Daemon
from testbed.servers import Fault, Proxy, SeaweedFS
from tests.support import datasets
from tests.support.processes import held_memory
from tests.support.training.jobs import (
    EXTENT,
    EXTENTS,
    PER_EXTENT,
    RECORDS,
    SAMPLES,
    Node,
    Records,
    Trainer,
    exactly_once,
    fetched,
    objects,
    records_at,
)
from tests.support.waiting import wait_until

BATCH = 64
STEPS = SAMPLES // BATCH
SHUFFLED: dict[str, Any] = {"batch_size": BATCH, "shuffle": True, "window": 2 * EXTENT}


@pytest.fixture
def records(node: Node) -> Records:
    """A cold dataset of eight extents."""
    found = records_at(node)
    node.proxy.reset()
    return found


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, s3_server: SeaweedFS) -> Iterator[Node]:
    """One daemon for all tests that need no special budget."""
    bucket = s3_server.create_bucket(f"job-{uuid.uuid4().hex[:8]}")
    options = ["--ram", "128MiB", "--allow", f"s3://{bucket}/", "--extent-bytes", str(EXTENT)]
    with (
        Proxy(s3_server.endpoint.removeprefix("http://")) as proxy,
        Daemon(tmp_path_factory.mktemp("node"), options, s3_server.env(proxy.endpoint)) as daemon,
    ):
        yield Node(daemon, proxy, s3_server, bucket)


@pytest.fixture
def node(shared: Node, monkeypatch: pytest.MonkeyPatch) -> Node:
    """The shared daemon, running. This process finds it by environment variables and has no credentials."""
    assert shared.daemon.process is not None
    if shared.daemon.process.poll() is not None:
        shared.daemon.start()
    monkeypatch.setenv("CACHESVC_SOCKET", shared.daemon.socket_dir)
    monkeypatch.setenv("CACHESVC", "require")
    shared.proxy.reset()
    return shared


def epoch(batches: DataLoader, rows: np.ndarray[Any, Any]) -> None:
    """Run one epoch in this process and check every byte."""
    seen: list[int] = []
    for batch in batches:
        seen += batches.indices.tolist()
        assert (batch.numpy().reshape(len(batch), -1) == rows[batches.indices]).all()
    assert sorted(seen) == list(range(len(rows)))


@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_trainer_with_credentials_continues_without_the_daemon(
    tmp_path: Path, node: Node, records: Records, workers: int
) -> None:
    env = node.s3.env(node.proxy.endpoint) | node.daemon.env | {"CACHESVC": "auto"}
    with Trainer(tmp_path / "rank", records.uri, SHUFFLED | {"num_workers": workers}, env) as trainer:
        said = trainer.take(5)
        node.daemon.kill()
        said += trainer.take(STEPS - 5)
        exactly_once(said, records.rows)
        read = trainer.said()["by_origin"]
        assert read["direct"] > 0
        assert read["ram"] + read["direct"] == records.rows.nbytes
        assert "the daemon does not serve (" in trainer.log
        assert "): reading directly from the source" in trainer.log


def test_a_trainer_without_credentials_waits_for_the_daemon_to_come_back(
    tmp_path: Path, node: Node, records: Records
) -> None:
    env = node.daemon.env | {"CACHESVC": "require", "CACHESVC_TIMEOUT_S": "30"}
    with Trainer(tmp_path / "rank", records.uri, SHUFFLED | {"num_workers": 2}, env) as trainer:
        said = trainer.take(5)
        node.daemon.kill()
        trainer.tell(STEPS - 5)
        wait_until(lambda: "waiting up to 30 s" in trainer.log)
        node.daemon.start()
        said += [trainer.said() for _ in range(STEPS - 5)]
        exactly_once(said, records.rows)
        assert trainer.said()["by_origin"]["direct"] == 0


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_daemon_that_stays_away_is_a_typed_error_within_the_deadline(
    node: Node, records: Records, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    monkeypatch.setenv("CACHESVC_TIMEOUT_S", "6")  # also the deadline of the first batch
    batches = iter(DataLoader(open_dataset(records.uri, **RECORDS), num_workers=workers, **SHUFFLED))
    next(batches)
    node.daemon.kill()
    started = time.monotonic()
    with pytest.raises(DaemonUnavailable, match="cachesvc serve"):
        list(batches)
    assert time.monotonic() - started < 60.0, "far below the default deadline"


@pytest.mark.slow
def test_after_a_restart_nvme_is_warm_and_held_memory_counts(
    tmp_path: Path, node: Node, records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvme = tmp_path / "nvme"
    nvme.mkdir()  # RAM keeps a part of the data, for all of it is read side by side
    options = ["--ram", "4MiB", "--nvme", f"{nvme}=32MiB", "--allow", records.uri]
    options += ["--extent-bytes", str(EXTENT)]
    with Daemon(tmp_path / "node", options, node.s3.env(node.proxy.endpoint)) as daemon:
        monkeypatch.setenv("CACHESVC_SOCKET", daemon.socket_dir)
        own = Node(daemon, node.proxy, node.s3, node.bucket)
        batches = DataLoader(open_dataset(records.uri, **RECORDS), **(SHUFFLED | {"window": "all"}))
        epoch(batches, records.rows)
        read = batches.stats().bytes_by_origin
        in_ram, on_disk = read["ram"] // EXTENT, read["nvme"] // EXTENT
        assert in_ram
        assert on_disk
        files = nvme / "cachesvc-nvme/v1/extents"
        wait_until(lambda: len(list(files.rglob("?" * 32 + ".*"))) >= on_disk)
        daemon.kill()
        daemon.start()
        node.proxy.reset()
        epoch(batches, records.rows)  # read from held extents, which the loader reports to the new daemon
        assert node.proxy.counts.bytes == 0
        assert own.ram().held_bytes == in_ram * EXTENT
        epoch(
            DataLoader(open_dataset(records.uri, **RECORDS), **(SHUFFLED | {"window": "all"})), records.rows
        )
        assert node.proxy.counts.bytes <= in_ram * EXTENT
        assert own.ram().used_bytes + own.ram().held_bytes <= 4 << 20


def test_a_killed_trainer_leaves_nothing_behind(tmp_path: Path, node: Node, records: Records) -> None:
    env = node.daemon.env | {"CACHESVC": "require"}
    with Trainer(tmp_path / "rank", records.uri, SHUFFLED | {"num_workers": 2}, env) as trainer:
        trainer.take(5)
        workers = trainer.children()
        ours = tuple(f"torch_{pid}_" for pid in (trainer.process.pid, *workers))
        assert len(workers) == 2
        wait_until(
            lambda: node.readers() >= 2
        )  # the trainer, which announces the plan, and each worker that read
        trainer.process.kill()
        trainer.process.wait()
        wait_until(lambda: node.readers() == 0)
        wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in workers))
        assert list((tmp_path / "rank" / "tmp").iterdir()) == []
    assert [name for name in os.listdir("/dev/shm") if name.startswith(ours)] == []

    def empty() -> bool:
        with Control(node.daemon.socket_dir) as control:
            for known in control.list():
                assert control.evict(DatasetId(known.dataset.id)).busy_bytes == 0
        return bool(node.ram().used_bytes == 0)

    wait_until(empty)  # running fills end first
    assert node.daemon.process is not None
    daemon = node.daemon.pid
    wait_until(lambda: held_memory(daemon) == [])


def test_one_rank_costs_the_source_each_byte_once(node: Node, records: Records) -> None:
    batches = DataLoader(open_dataset(records.uri, **RECORDS), **SHUFFLED)
    epoch(batches, records.rows)
    assert fetched(node) == records.rows.nbytes
    epoch(batches, records.rows)
    assert fetched(node) == records.rows.nbytes


def test_four_ranks_with_two_workers_each_cost_the_source_each_byte_once(
    tmp_path: Path, node: Node, records: Records
) -> None:
    ranks = []
    for rank in range(4):
        env = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
        loading = SHUFFLED | {"num_workers": 2}
        ranks.append(Trainer(tmp_path / str(rank), records.uri, loading, env | node.daemon.env))
    try:
        for _ in range(2):
            for one in ranks:
                one.tell(STEPS // 4)
            exactly_once([one.said() for one in ranks for _ in range(STEPS // 4)], records.rows)
            assert [set(one.said()) for one in ranks] == [{"ended", "by_origin"}] * 4
            assert fetched(node) == records.rows.nbytes
    finally:
        for one in ranks:
            one.__exit__()


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_first_batch_waits_for_its_window_only(
    tmp_path: Path, node: Node, records: Records, monkeypatch: pytest.MonkeyPatch, shuffle: bool
) -> None:
    loading: dict[str, Any] = {"batch_size": BATCH, "shuffle": shuffle, "window": 2 * EXTENT}
    datasets.write_files(tmp_path / "same", objects(records.rows))
    monkeypatch.setenv("CACHESVC", "off")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    same = DataLoader(open_dataset(tmp_path / "same", **RECORDS, extent_bytes=EXTENT), **loading)
    first = [same.indices // PER_EXTENT for _, _ in zip(range(PER_EXTENT // BATCH * (1 + shuffle)), same)]
    window = {int(extent) for batch in first for extent in batch}
    assert len(window) == 1 + shuffle
    monkeypatch.setenv("CACHESVC", "require")
    for extent in set(range(EXTENTS)) - window:
        node.proxy.faults.append(Fault("slow", 100, f"/{extent}.bin", after_s=60.0))
    try:
        batches = DataLoader(open_dataset(records.uri, **RECORDS), **loading)
        node.proxy.reset()
        batch = next(iter(batches))
        assert (batch.numpy() == records.rows[batches.indices]).all()
        assert node.proxy.counts.bytes <= len(window) * EXTENT
    finally:
        node.proxy.faults.clear()
        node.daemon.kill()
        node.proxy.hang_up()


@pytest.mark.slow
def test_tar_shards_are_indexed_while_they_are_filled(tmp_path: Path, node: Node) -> None:
    wanted = datasets.tar_shards(tmp_path, shards=3, per_shard=40, size_bytes=30_000)
    shards = {path.name: path.read_bytes() for path in tmp_path.glob("*.tar")}
    uri = node.put(shards)
    size = sum(map(len, shards.values()))
    node.proxy.reset()
    found = open_dataset(uri, fields=("jpg", "cls"), decode=None)
    assert len(found) == len(wanted)
    batches = DataLoader(found, batch_size=8, shuffle=True, collate_fn=list)
    got = [sample for batch in batches for sample in batch]
    assert sorted(got) == sorted((one["jpg"], one["cls"]) for one in wanted.values())
    assert size <= node.proxy.counts.bytes <= 1.01 * size
