"""A daemon that comes back knowing nothing (another state directory) goes on serving the jobs that run."""

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


@pytest.fixture
def daemon(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    """With room for three extents, so that a job keeps asking."""
    options = ["--ram", f"{3 * EXTENT}", "--extent-bytes", f"{EXTENT}", "--allow", f"{data}/"]
    with Daemon(tmp_path / "node", options) as found:
        monkeypatch.setenv("CACHESVC_SOCKET", found.socket_dir)
        yield found


def opened(data: Path) -> Dataset:
    return open_dataset(data, format="records", record_bytes=RECORD)


def forget(daemon: Daemon) -> None:
    daemon.kill()
    shutil.rmtree(daemon.root / "state")
    daemon.start()


def seen(loader: DataLoader, daemon: Daemon) -> list[int]:
    """The indices of an epoch in whose midst the daemon forgets everything."""
    found: list[int] = []
    for step, batch in enumerate(loader):
        assert np.array_equal(batch.numpy(), ROWS[loader.indices])
        found += loader.indices.tolist()
        if step == 4:
            forget(daemon)
    return sorted(found)


@pytest.mark.parametrize("workers", [{}, {"num_workers": 1}, {"num_workers": 1, "worker_type": "thread"}])
@pytest.mark.parametrize("way", ["auto", "require"])
def test_a_job_goes_on_with_a_daemon_that_forgot_its_dataset(
    daemon: Daemon, data: Path, monkeypatch: pytest.MonkeyPatch, way: str, workers: dict[str, Any]
) -> None:
    monkeypatch.setenv("CACHESVC", way)
    loader = DataLoader(opened(data), **LOADING, **workers)
    assert seen(loader, daemon) == list(range(SAMPLES))
    assert sum(len(batch) for batch in loader) == SAMPLES  # its plan is announced to the new one


def test_a_job_goes_on_with_a_daemon_that_has_other_extents_by_now(
    daemon: Daemon, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CACHESVC", "require")
    dataset = opened(data)
    daemon._options += ["--extent-bytes", f"{EXTENT // 2}"]  # the last one counts
    forget(daemon)
    loader = DataLoader(dataset, **LOADING)
    assert sum(len(batch) for batch in loader) == SAMPLES
    with pytest.raises(SourceChanged, match=r"extents of 524,288 bytes, this daemon's"):
        open_dataset(data, format="records", record_bytes=RECORD, version=dataset.version)


def test_workers_that_are_spawned_find_their_catalog_again(
    daemon: Daemon, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CACHESVC", "require")
    dataset = opened(data)
    forget(daemon)
    loader = DataLoader(dataset, num_workers=1, multiprocessing_context="spawn", **LOADING)
    assert sum(len(batch) for batch in loader) == SAMPLES


def test_a_source_that_moved_on_meanwhile_is_said_and_not_listed_again(
    daemon: Daemon, data: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CACHESVC", "require")
    dataset = opened(data)
    os.utime(data / "0.bin", (1, 1))
    forget(daemon)
    for _ in range(3):
        with pytest.raises(SourceChanged, match="version"):
            dataset[0]
    assert caplog.text.count("opens it again") == 1


def test_an_object_that_is_gone_is_no_reason_to_open_again(
    daemon: Daemon, data: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CACHESVC", "require")
    dataset = opened(data)
    (data / "0.bin").unlink()
    with pytest.raises(NotFound, match=r"0\.bin"):
        list(DataLoader(dataset, batch_size=64))
    assert "opens it again" not in caplog.text
