"""A run over 10^9 samples in 10^5 extents, with a real loader and daemon, resumes anywhere fast and in little memory."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from loader import DataLoader, Dataset, open_dataset
from testbed.node import Daemon
from testbed.usage import anonymous_bytes

SAMPLES, RECORD, EXTENT = 10**9, 8, 19 * 4096
BATCH = 256
FIRST_BATCH_S = 5.0
PEAK_BYTES = 100e6


@pytest.fixture(scope="module")
def holes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sparse file of 8 GB."""
    path = tmp_path_factory.mktemp("billion") / "samples.bin"
    with open(path, "wb") as file:
        file.truncate(SAMPLES * RECORD)
    return path


@pytest.fixture(scope="module", autouse=True)
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    node = Daemon(tmp_path_factory.mktemp("node"), ["--ram", "64MiB"])
    with node as daemon, pytest.MonkeyPatch.context() as patch:
        patch.setenv("CACHESVC_SOCKET", daemon.socket_dir)
        patch.setenv("CACHESVC", "require")
        yield


def opened(path: Path) -> Dataset:
    data = open_dataset(path, format="records", record_bytes=RECORD, extent_bytes=EXTENT)
    assert len(data) == SAMPLES
    return data


def after(data: Dataset, share: float, workers: int) -> DataLoader:
    """A loader that has loaded the state of another loader after this share of an epoch."""
    saved, loader = (DataLoader(data, BATCH, shuffle=True, num_workers=workers) for _ in range(2))
    saved.skip(int(SAMPLES // BATCH * share))
    loader.load_state_dict(saved.state_dict())
    return loader


def resume(holes: Path, share: float, workers: int) -> float:
    """Resume after this share of an epoch; return the seconds to the first batch. Asserts that the batch is right and
    that memory stays bounded."""
    shown = after(opened(holes), share, workers)
    next(iter(shown))
    expected = shown.indices
    with open(holes, "r+b") as file:
        for index in expected.tolist():
            os.pwrite(file.fileno(), np.int64(index).tobytes(), index * RECORD)
    before_bytes = anonymous_bytes([os.getpid()])
    data = opened(holes)  # a new version, since the file was written
    began = time.monotonic()
    batch = next(iter(after(data, share, workers)))
    took_s = time.monotonic() - began
    assert anonymous_bytes([os.getpid()]) - before_bytes < PEAK_BYTES
    assert np.array_equal(batch.view(torch.int64).flatten().numpy(), expected)
    assert len(set(expected.tolist())) == BATCH
    return took_s


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("share", [0.01, 0.5, 0.99])
def test_the_first_batch_after_a_resume_comes_within_seconds(holes: Path, share: float, workers: int) -> None:
    assert resume(holes, share, workers) < FIRST_BATCH_S
