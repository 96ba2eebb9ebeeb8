"""A daemon that restarts without its state continues to serve the running jobs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cachesvc.core.errors import NotFound, SourceChanged
from loader import DataLoader, Dataset, open_dataset
from testbed.node import Daemon
from tests.support.shared_daemon import for_one_test

EXTENT, RECORD, EXTENTS = 1 << 20, 4096, 8
SAMPLES = EXTENTS * EXTENT // RECORD
ROWS = np.random.default_rng(0).integers(0, 256, (SAMPLES, RECORD), np.uint8)
LOADING: dict[str, Any] = {"batch_size": 64, "shuffle": True, "window": EXTENT}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    for n, rows in enumerate(np.split(ROWS, EXTENTS)):
        (tmp_path / "data" / f"{n}.bin").write_bytes(rows.tobytes())
    return tmp_path / "data"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon with room for three extents, so that a job keeps asking for extents."""
    root = tmp_path_factory.getbasetemp()
    options = ["--ram", f"{3 * EXTENT}", "--extent-bytes", f"{EXTENT}", "--allow", f"{root}/"]
    with Daemon(tmp_path_factory.mktemp("node"), options) as found:
        yield found


@pytest.fixture
def daemon(shared: Daemon, monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    monkeypatch.setenv("CACHESVC_SOCKET", shared.socket_dir)
    yield from for_one_test(shared)


def opened(data: Path) -> Dataset:
    return open_dataset(data, format="records", record_bytes=RECORD)


def restart_without_state(daemon: Daemon) -> None:
    daemon.kill()
    shutil.rmtree(daemon.root / "state")
    daemon.start()


def seen(loader: DataLoader, daemon: Daemon) -> list[int]:
    """Sorted indices of one epoch, during which the daemon restarts without its state."""
    found: list[int] = []
    for step, batch in enumerate(loader):
        assert np.array_equal(batch.numpy(), ROWS[loader.indices])
        found += loader.indices.tolist()
        if step == 4:
            restart_without_state(daemon)
    return sorted(found)


@pytest.mark.parametrize(
    "workers",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"num_workers": 1},
        pytest.param({"num_workers": 1, "worker_type": "thread"}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("mode", ["auto", pytest.param("require", marks=pytest.mark.slow)])
def test_a_job_continues_with_a_daemon_that_lost_its_datasets(
    daemon: Daemon, data: Path, monkeypatch: pytest.MonkeyPatch, mode: str, workers: dict[str, Any]
) -> None:
    monkeypatch.setenv("CACHESVC", mode)
    loader = DataLoader(opened(data), **LOADING, **workers)
    assert seen(loader, daemon) == list(range(SAMPLES))
    assert sum(len(batch) for batch in loader) == SAMPLES  # the plan reaches the new daemon


@pytest.mark.slow
def test_a_job_continues_with_a_daemon_of_another_extent_size(
    daemon: Daemon, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CACHESVC", "require")
    dataset = opened(data)
    monkeypatch.setattr(daemon, "_options", [*daemon._options, "--extent-bytes", f"{EXTENT // 2}"])
    restart_without_state(daemon)  # the last of two values counts
    loader = DataLoader(dataset, **LOADING)
    assert sum(len(batch) for batch in loader) == SAMPLES
    with pytest.raises(SourceChanged, match=r"extents of 524,288 bytes, this daemon's"):
        open_dataset(data, format="records", record_bytes=RECORD, version=dataset.version)
    daemon.kill()  # the next test starts it with the extents of all others


@pytest.mark.slow
def test_spawned_workers_find_their_catalog_again(
    daemon: Daemon, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CACHESVC", "require")
    dataset = opened(data)
    restart_without_state(daemon)
    loader = DataLoader(dataset, num_workers=1, multiprocessing_context="spawn", **LOADING)
    assert sum(len(batch) for batch in loader) == SAMPLES


def test_a_source_that_changed_meanwhile_is_an_error_and_is_reopened_once_only(
    daemon: Daemon, data: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CACHESVC", "require")
    dataset = opened(data)
    os.utime(data / "0.bin", (1, 1))
    restart_without_state(daemon)
    for _ in range(3):
        with pytest.raises(SourceChanged, match="version"):
            dataset[0]
    assert caplog.text.count(f"{dataset.version}: it opens it again") == 1


def test_a_missing_object_does_not_reopen_the_dataset(
    daemon: Daemon, data: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CACHESVC", "require")
    dataset = opened(data)
    (data / "0.bin").unlink()
    with pytest.raises(NotFound, match=r"0\.bin"):
        list(DataLoader(dataset, batch_size=64))
    assert f"{dataset.version}: it opens it again" not in caplog.text
