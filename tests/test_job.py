"""Whole jobs, and what may happen to them: a real S3 server behind a counting proxy, a daemon, trainers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest

from bench.node import Daemon
from cachesvc.client.control import Control
from cachesvc.core.errors import DaemonUnavailable
from loader import DataLoader, open_dataset
from tests import datasets
from tests.servers import Fault, Proxy, SeaweedFS
from tests.test_daemon import held_memory, wait_until
from tests.trainer import digest

EXTENT = 1 << 20
RECORD = 4096
PER_EXTENT = EXTENT // RECORD
EXTENTS = 8
SAMPLES = EXTENTS * PER_EXTENT
BATCH = 64
STEPS = SAMPLES // BATCH
RECORDS = {"format": "records", "record_bytes": RECORD}
SHUFFLED = {"batch_size": BATCH, "shuffle": True, "window": 2 * EXTENT}
ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Node:
    """A daemon before a bucket, and the proxy that counts what it fetches."""

    daemon: Daemon
    proxy: Proxy
    s3: SeaweedFS
    bucket: str

    def ram(self) -> Any:
        """The RAM tier's status."""
        with Control(self.daemon.socket_dir) as control:
            return next(tier for tier in control.status().tiers if tier.name == "ram")

    def readers(self) -> int:
        """Connections that read a dataset."""
        with Control(self.daemon.socket_dir) as control:
            return int(control.status().readers)

    def put(self, objects: dict[str, bytes]) -> str:
        """Objects under a new prefix; answers its URI."""
        prefix, client = uuid.uuid4().hex[:8], self.s3.client()
        for name, body in objects.items():
            client.put_object(Bucket=self.bucket, Key=f"{prefix}/{name}", Body=body)
        return f"s3://{self.bucket}/{prefix}/"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, s3_server: SeaweedFS) -> Iterator[Node]:
    """One daemon for all tests that need no budget of their own."""
    bucket = s3_server.create_bucket(f"job-{uuid.uuid4().hex[:8]}")
    options = ["--ram", "128MiB", "--allow", f"s3://{bucket}/", "--extent-bytes", str(EXTENT)]
    with (
        Proxy(s3_server.endpoint.removeprefix("http://")) as proxy,
        Daemon(tmp_path_factory.mktemp("node"), options, s3_server.env(proxy.endpoint)) as daemon,
    ):
        yield Node(daemon, proxy, s3_server, bucket)


@pytest.fixture
def node(shared: Node, monkeypatch: pytest.MonkeyPatch) -> Node:
    """The shared daemon, alive, found by this process, which has no credentials."""
    assert shared.daemon.process is not None
    if shared.daemon.process.poll() is not None:
        shared.daemon.start()
    monkeypatch.setenv("CACHESVC_SOCKET", shared.daemon.socket_dir)
    monkeypatch.setenv("CACHESVC", "require")
    shared.proxy.reset()
    return shared


@dataclass(frozen=True)
class Records:
    """One extent an object; `rows[i]` is sample i."""

    uri: str
    rows: np.ndarray[Any, Any]


def records_at(node: Node) -> Records:
    rows = np.random.default_rng(uuid.uuid4().int).integers(0, 256, (SAMPLES, RECORD), np.uint8)
    return Records(node.put(objects(rows)), rows)


def objects(rows: np.ndarray[Any, Any]) -> dict[str, bytes]:
    return {
        f"{n}.bin": rows[n * PER_EXTENT : (n + 1) * PER_EXTENT].tobytes()
        for n in range(len(rows) // PER_EXTENT)
    }


@pytest.fixture
def records(node: Node) -> Records:
    """A cold dataset of eight extents."""
    found = records_at(node)
    node.proxy.reset()
    return found


class Trainer:
    """`tests.trainer` as a process; sees no credentials but those in `env`."""

    def __init__(self, folder: Path, uri: str, loading: dict[str, Any], env: dict[str, str]) -> None:
        self.folder = folder
        (folder / "tmp").mkdir(parents=True)
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "CACHESVC"))}
        clean |= {"HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache"), "TMPDIR": str(folder / "tmp")}
        with open(folder / "log", "wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.trainer", uri, json.dumps(RECORDS), json.dumps(loading)],
                env=clean | {"AWS_EC2_METADATA_DISABLED": "true"} | env,
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def tell(self, batches: int) -> None:
        """Let it take so many more batches."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{batches}\n")
        self.process.stdin.flush()

    def said(self) -> dict[str, Any]:
        """Its next line."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the trainer ended: {self.log}"
        found: dict[str, Any] = json.loads(line)
        return found

    def take(self, batches: int) -> list[dict[str, Any]]:
        """Let it take so many batches, and read what it says of them."""
        self.tell(batches)
        return [self.said() for _ in range(batches)]

    def children(self) -> list[int]:
        pid = self.process.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def exactly_once(said: list[dict[str, Any]], rows: np.ndarray[Any, Any]) -> None:
    """Every sample once, and each with its own bytes."""
    assert all("indices" in one for one in said), said
    indices = [index for one in said for index in one["indices"]]
    assert sorted(indices) == list(range(len(rows)))
    digests = [found for one in said for found in one["digests"]]
    assert digests == [digest(rows[index].tobytes()) for index in indices]


def epoch(batches: DataLoader, rows: np.ndarray[Any, Any]) -> None:
    """Run one epoch here and check every byte of it."""
    seen: list[int] = []
    for batch in batches:
        seen += batches.indices.tolist()
        assert (batch.numpy().reshape(len(batch), -1) == rows[batches.indices]).all()
    assert sorted(seen) == list(range(len(rows)))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_killed_daemon_costs_a_trainer_with_credentials_nothing(
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
        assert "the daemon is gone (" in trainer.log
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


@pytest.mark.parametrize("workers", [0, 2])
def test_a_daemon_that_stays_away_is_a_typed_error_within_the_deadline(
    node: Node, records: Records, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    monkeypatch.setenv("CACHESVC_TIMEOUT_S", "6")  # of the first batch too
    batches = iter(DataLoader(open_dataset(records.uri, **RECORDS), num_workers=workers, **SHUFFLED))
    next(batches)
    node.daemon.kill()
    started = time.monotonic()
    with pytest.raises(DaemonUnavailable, match="cachesvc serve"):
        list(batches)
    assert time.monotonic() - started < 20.0


def test_after_a_restart_files_are_warm_and_memory_that_is_held_counts(
    tmp_path: Path, node: Node, records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvme = tmp_path / "nvme"
    nvme.mkdir()
    options = ["--ram", "4MiB", "--nvme", f"{nvme}=32MiB", "--allow", records.uri]
    options += ["--extent-bytes", str(EXTENT)]
    with Daemon(tmp_path / "node", options, node.s3.env(node.proxy.endpoint)) as daemon:
        monkeypatch.setenv("CACHESVC_SOCKET", daemon.socket_dir)
        own = Node(daemon, node.proxy, node.s3, node.bucket)
        batches = DataLoader(open_dataset(records.uri, **RECORDS), **SHUFFLED)
        epoch(batches, records.rows)
        read = batches.stats().bytes_by_origin
        in_ram, on_disk = read["ram"] // EXTENT, read["nvme"] // EXTENT
        assert in_ram
        assert on_disk
        files = nvme / "cachesvc/v1/extents"
        wait_until(lambda: len(list(files.rglob("?" * 32 + ".*"))) >= on_disk)
        daemon.kill()
        daemon.start()
        node.proxy.reset()
        epoch(batches, records.rows)  # from what it holds, and the new daemon hears of that
        assert node.proxy.counts.bytes == 0
        assert own.ram().held_bytes == in_ram * EXTENT
        epoch(DataLoader(open_dataset(records.uri, **RECORDS), **SHUFFLED), records.rows)
        assert node.proxy.counts.bytes <= in_ram * EXTENT
        assert own.ram().used_bytes + own.ram().held_bytes <= 4 << 20


def test_a_killed_trainer_leaves_nothing_behind(tmp_path: Path, node: Node, records: Records) -> None:
    env = node.daemon.env | {"CACHESVC": "require"}
    with Trainer(tmp_path / "rank", records.uri, SHUFFLED | {"num_workers": 2}, env) as trainer:
        trainer.take(5)
        workers = trainer.children()
        ours = tuple(f"torch_{pid}_" for pid in (trainer.process.pid, *workers))
        assert len(workers) == 2
        wait_until(lambda: node.readers() == 3)  # the trainer's, which has the plan, and its workers'
        trainer.process.kill()
        trainer.process.wait()
        wait_until(lambda: node.readers() == 0)
        wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in workers))
        assert list((tmp_path / "rank" / "tmp").iterdir()) == []
    assert [name for name in os.listdir("/dev/shm") if name.startswith(ours)] == []

    def empty() -> bool:
        with Control(node.daemon.socket_dir) as control:
            for known in control.list():
                assert control.evict(known.dataset.id).busy_bytes == 0
        return bool(node.ram().used_bytes == 0)

    wait_until(empty)  # fills that were under way come to their end
    assert node.daemon.process is not None
    daemon = node.daemon.process.pid
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


def fetched(node: Node) -> int:
    """Bytes of objects that were asked for, in ranges or whole; listings have a query."""
    total = 0
    client = node.s3.client()
    for key, count in node.proxy.counts.by.items():
        first, dash, last = key.partition("bytes=")[2].partition("-")
        if dash:
            total += count * (int(last) - int(first) + 1)
        elif key.startswith("GET ") and "?" not in key:
            bucket, _, name = unquote(key.removeprefix("GET /")).partition("/")
            total += count * int(client.head_object(Bucket=bucket, Key=name)["ContentLength"])
    return total


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_first_batch_waits_for_its_window_alone(
    tmp_path: Path, node: Node, records: Records, monkeypatch: pytest.MonkeyPatch, shuffle: bool
) -> None:
    loading = {"batch_size": BATCH, "shuffle": shuffle, "window": 2 * EXTENT}
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
