"""The daemon and the simulated node on the same trace: the same hit rate."""

from __future__ import annotations

import os
import time
from contextlib import closing
from pathlib import Path

import pytest

from cachesvc.__main__ import run
from cachesvc.catalog.options import Options
from cachesvc.client.control import Control
from cachesvc.client.grants import DaemonGrants
from cachesvc.client.protocol import Granted
from cachesvc.core.model import DatasetId
from cachesvc.simulate.compare import simulate
from cachesvc.simulate.simulated_node import NodeSpec, tiers_of
from cachesvc.simulate.trace import Workload
from cachesvc.v1 import cachesvc_pb2 as pb
from loader import DataLoader, open_dataset
from testbed.node import Daemon

SHARD_BYTES = 256 << 10
SAMPLES = 64
AHEAD = 12
"""Shards of the next epoch that may have been fetched: 0.6 % of 2,000."""
WORK = Workload(200, SAMPLES, SHARD_BYTES, batch=64, window=4, epochs=3, seed=4)


def _shards(folder: Path) -> None:
    folder.mkdir()
    for shard in range(WORK.shards):
        (folder / f"{shard:04d}.bin").write_bytes(os.urandom(SHARD_BYTES))


@pytest.mark.slow
@pytest.mark.parametrize(("f", "ram"), [(0.35, 1.0), (0.8, 1.0), (0.5, 0.3), (0.8, 0.1)])
def test_the_daemon_hits_as_often_as_the_simulated_node(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    f: float,
    ram: float,
) -> None:
    """`ram` is the part of the cache that is RAM; the rest is NVMe."""
    data = tmp_path / "data"
    _shards(data)
    capacity = int(f * WORK.size_bytes)
    in_ram = int(ram * capacity)
    options = ["--ram", str(in_ram), "--extent-bytes", str(SHARD_BYTES), "--allow", f"{data}/"]
    if ram < 1:
        (tmp_path / "nvme").mkdir()
        options += ["--nvme", f"{tmp_path / 'nvme'}={capacity - in_ram}"]
    with Daemon(tmp_path / "node", options) as node:
        monkeypatch.setenv("CACHESVC_SOCKET", node.socket_dir)
        monkeypatch.setenv("CACHESVC", "require")
        dataset = open_dataset(str(data), format="records", record_bytes=SHARD_BYTES // SAMPLES)
        batches = DataLoader(dataset, batch_size=64, shuffle=True, seed=WORK.seed, window=4 * SHARD_BYTES)
        for _ in range(WORK.epochs):
            assert sum(1 for _ in batches) == WORK.shards * SAMPLES // 64
        with Control(node.socket_dir) as control:
            (found,) = control.status().datasets
            time.sleep(1.1)  # fillers report their requests once a second
            asked_bytes = control.status().sources.bytes
        assert run(["status", "--socket", node.socket_dir]) == 0
    least_bytes = WORK.size_bytes + (WORK.epochs - 1) * (WORK.size_bytes - capacity)
    assert asked_bytes <= 1.02 * least_bytes + AHEAD * SHARD_BYTES
    simulated = simulate("keep", NodeSpec(tiers_of(in_ram, capacity - in_ram)), WORK)
    told = capsys.readouterr().out
    rates = [epoch.hit_rate for epoch in found.epochs]
    print(f"f = {f}: daemon {rates}, simulated {[epoch.hit_rate for epoch in simulated.epochs]}")
    assert [epoch.number for epoch in found.epochs] == [0, 1, 2]
    assert [epoch.touched for epoch in found.epochs] == [WORK.shards] * 3, "the last of each epoch included"
    assert all(f"{100 * rate:.1f}" in told for rate in rates), "the table tells each epoch"
    for epoch, expected in zip(found.epochs, simulated.epochs, strict=True):
        assert round(abs(epoch.hit_rate - expected.hit_rate), 9) <= 0.02  # 0.49 - 0.47 is more, in floats
        assert epoch.bound == pytest.approx(f, abs=0.01)
        assert epoch.of_bound == pytest.approx(epoch.hit_rate / epoch.bound)


@pytest.mark.slow
@pytest.mark.parametrize(("share", "least", "most"), [("0", 0.0, 0.6), ("0.2", 0.9, 1.0)])
def test_extents_read_again_without_a_plan_stay_beside_a_job_that_streams(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: str, least: float, most: float
) -> None:
    """A job reads 60 shards in a cache of 30. Another reads 4 of 60 other shards again and again, then 4 more."""
    shards = 60
    for name in ("trained", "looked_at"):
        (tmp_path / name).mkdir()
        for shard in range(shards):
            (tmp_path / name / f"{shard:04d}.bin").write_bytes(os.urandom(SHARD_BYTES))
    options = ["--ram", str(30 * SHARD_BYTES), "--extent-bytes", str(SHARD_BYTES), "--allow", f"{tmp_path}/"]
    record_bytes = SHARD_BYTES // SAMPLES
    with Daemon(tmp_path / "node", [*options, "--unplanned-share", share]) as node:
        monkeypatch.setenv("CACHESVC_SOCKET", node.socket_dir)
        monkeypatch.setenv("CACHESVC", "require")
        dataset = open_dataset(str(tmp_path / "trained"), format="records", record_bytes=record_bytes)
        batches = DataLoader(dataset, batch_size=SAMPLES, shuffle=True, window=4 * SHARD_BYTES)
        with Control(node.socket_dir) as control:
            looked_at = control.open_dataset(
                [f"{tmp_path / 'looked_at'}/"], Options(format="records", record_bytes=record_bytes)
            )
            with closing(DaemonGrants(node.socket_dir, looked_at.id)) as visitor:
                for index in range(shards):
                    look(visitor, index)
                before = counters(control, looked_at.id)
                for start in range(40, shards, 4):
                    for number, _ in enumerate(batches):
                        look(visitor, start + number % 4)
                after = counters(control, looked_at.id)
    hits, misses = after.hits - before.hits, after.misses - before.misses + after.refused - before.refused
    assert hits + misses == shards * 5
    assert least <= hits / (hits + misses) <= most


def look(grants: DaemonGrants, index: int) -> None:
    (answer,) = grants.acquire([index], 30.0)
    if isinstance(answer, Granted):
        os.close(answer.fd)
        grants.release([index])


def counters(control: Control, dataset: DatasetId) -> pb.DatasetStatus:
    return next(each for each in control.status().datasets if each.dataset.id == dataset)
