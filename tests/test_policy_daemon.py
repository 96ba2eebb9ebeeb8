"""The daemon and the simulated node on the same trace: the same hit rate."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench.node import Daemon
from cachesvc.__main__ import run
from cachesvc.client import Control
from cachesvc.simulate.compare import simulate
from cachesvc.simulate.engine import NodeSpec, tiers_of
from cachesvc.simulate.trace import Workload
from loader import DataLoader, open_dataset

SHARD_BYTES = 256 << 10
SAMPLES = 64
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
    """`ram`: the part of the cache that is RAM; the rest is NVMe."""
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
        assert run(["status", "--socket", node.socket_dir]) == 0
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
