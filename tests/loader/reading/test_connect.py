"""The policy by which data is read through a daemon or directly."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cachesvc.core.errors import (
    DaemonUnavailable,
    InvalidInput,
)
from loader import DataLoader, open_dataset
from testbed.servers import SeaweedFS


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CACHESVC_SOCKET", str(tmp_path / "nobody"))
    return tmp_path


def test_several_ranks_require_a_daemon_for_remote_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHESVC", "require")
    with pytest.raises(DaemonUnavailable, match="cachesvc serve"):
        open_dataset("s3://bucket/prefix/")


def test_ranks_without_a_daemon_and_a_policy_are_told_both_options(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in {"CACHESVC_SOCKET": str(tmp_path), "RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("CACHESVC", raising=False)
    monkeypatch.setattr("cachesvc.client.opening.REQUIRE_S", 0.0)
    with pytest.raises(DaemonUnavailable, match=r"cachesvc serve \(a job of 2 ranks .*CACHESVC=auto"):
        open_dataset("s3://bucket/prefix/")


def test_a_policy_that_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    monkeypatch.setenv("CACHESVC", "perhaps")
    with pytest.raises(InvalidInput, match="perhaps"):
        open_dataset(home)


def test_a_bucket_is_read_without_a_daemon(
    s3_server: SeaweedFS, s3_env: dict[str, str], bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CACHESVC", "off")
    rows = np.random.default_rng(0).integers(0, 256, (300, 1000), np.uint8)
    s3_server.client().put_object(Bucket=bucket, Key="data/r.bin", Body=rows.tobytes())
    uri = f"s3://{bucket}/data/r.bin"
    dataset = open_dataset(uri, format="records", record_bytes=1000, extent_bytes=40960)
    loader = DataLoader(dataset, batch_size=32, shuffle=True)
    for _ in range(2):
        for batch in loader:
            assert (batch.numpy() == rows[loader.indices]).all()
    stats = loader.stats()
    assert (stats.samples, stats.bytes_by_origin["direct"]) == (300, 300_000)
    dataset.close()
    assert loader.stats() == stats, "what was read stays read"
    assert sum(1 for _ in loader) == len(loader)
    assert loader.stats().bytes_by_origin["direct"] == 300_000
