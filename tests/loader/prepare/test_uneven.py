"""Prepared samples of unlike shapes through a daemon: what the function gives by hand, in extents of their real size."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cachesvc.client.control import Control
from cachesvc.core.errors import InvalidInput
from cachesvc.core.model import DatasetId
from loader import DataLoader, open_dataset
from loader.datasets.dataset import Dataset
from testbed.node import Daemon
from tests.loader.prepare.pictures import COUNT, SPELLED_BYTES, calls, same, spelled, write_pictures
from tests.support.shared_daemon import for_one_test
from tests.support.waiting import wait_until

EXTENT = 16 << 10


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    root = tmp_path_factory.mktemp("uneven")
    write_pictures(root / "data")
    (root / "disk").mkdir()
    options = ["--ram", f"{8 * EXTENT}", "--nvme", f"{root}/disk=8MiB", "--extent-bytes", str(EXTENT)]
    with Daemon(root / "node", [*options, "--fillers", "1", "--allow", f"{root}/"]) as found:
        yield found


@pytest.fixture
def daemon(shared: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    monkeypatch.setenv("CACHESVC", "require")
    monkeypatch.setenv("CACHESVC_SOCKET", shared.socket_dir)
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    (tmp_path / "calls").touch()
    yield from for_one_test(shared)


@pytest.fixture
def data(shared: Daemon) -> str:
    return str(shared.root.parent / "data")


def opened(data: str, max_bytes: int = SPELLED_BYTES) -> Dataset:
    return open_dataset(data, prepare=spelled, prepare_max_bytes=max_bytes)


def batches_of(dataset: Dataset, world_size: int = 1, **more: Any) -> list[tuple[list[Any], list[int]]]:
    """The batches of an epoch of all ranks, and the indices of each."""
    found = []
    for rank in range(world_size):
        loader = DataLoader(
            dataset, 6, shuffle=True, collate_fn=list, rank=rank, world_size=world_size, **more
        )
        found += [(batch, loader.indices.tolist()) for batch in loader]
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_ledger_of_uneven_samples_is_that_of_the_function_called_by_hand(
    daemon: Daemon, data: str, world_size: int
) -> None:
    plain, prepared = open_dataset(data), opened(data)
    by_hand = [spelled(plain[n]) for n in range(COUNT)]
    found = batches_of(prepared, world_size)
    assert sorted(n for _, ids in found for n in ids) == [*range(COUNT)]
    assert all(same(sample, by_hand[n]) for batch, ids in found for sample, n in zip(batch, ids, strict=True))
    assert [ids for _, ids in found] == [ids for _, ids in batches_of(open_dataset(data), world_size)]


def test_extents_have_their_real_size_and_survive_evictions_and_a_restart(
    daemon: Daemon, data: str, tmp_path: Path
) -> None:
    first = opened(data)
    expected, dataset = batches_of(first, num_workers=2), first.opened.link.id
    reserved_bytes = int(first.opened.catalog.extent_sizes.sum())
    first.close()
    real_bytes = sum(
        each["ids"].nbytes + each["rows"].nbytes + len(each["text"].encode()) + len(each["raw"]) + 8
        for batch, _ in expected
        for each in batch
    )
    with Control(daemon.socket_dir) as control:
        (listed,) = [each for each in control.list() if each.dataset.id == dataset]
    assert listed.resident_extents == listed.dataset.extents
    assert real_bytes < listed.resident_bytes == listed.dataset.size_bytes < 0.7 * reserved_bytes
    wait_until(lambda: evicted(daemon, dataset))
    assert same(batches_of(opened(data)), expected)
    daemon.stop()
    gc.collect()
    called = calls(tmp_path / "calls").total()
    daemon.start()
    assert same(batches_of(opened(data)), expected)
    assert calls(tmp_path / "calls").total() - called < COUNT, "what was on the disk is there"


def evicted(daemon: Daemon, dataset: DatasetId) -> bool:
    gc.collect()
    with Control(daemon.socket_dir) as control:
        return not control.evict(dataset).busy_bytes


def test_a_sample_larger_than_declared_is_its_own_typed_error(daemon: Daemon, data: str) -> None:
    plain, small = open_dataset(data), opened(data, SPELLED_BYTES // 2)
    for _ in range(2):
        fits = [n for n in range(COUNT) if takes(spelled(plain[n])) <= SPELLED_BYTES // 2]
        assert 0 < len(fits) < COUNT
        found = batches_of(small, on_error="skip")
        assert sorted(n for _, ids in found for n in ids if n >= 0) == fits
        large = next(n for n in range(COUNT) if n not in fits)
        with pytest.raises(InvalidInput, match=r"png of .* bytes, and prepare_max_bytes=1600 is declared"):
            small[large]


def takes(sample: dict[str, Any]) -> int:
    return sum(
        len(value.encode())
        if isinstance(value, str)
        else len(bytes(value))
        if isinstance(value, bytes)
        else size(value)
        for value in sample.values()
    )


def size(value: Any) -> int:
    return int(value.nbytes) if isinstance(value, (np.ndarray, torch.Tensor)) else 8


@pytest.mark.slow
def test_a_reader_prepares_uneven_samples_for_itself_while_the_daemon_is_gone(
    daemon: Daemon, data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CACHESVC", "auto")
    by_hand, dataset = [spelled(open_dataset(data)[n]) for n in range(COUNT)], opened(data)
    daemon.kill()
    found = batches_of(dataset)
    assert all(same(sample, by_hand[n]) for batch, ids in found for sample, n in zip(batch, ids, strict=True))


@pytest.mark.parametrize("wrong", [-1, 1 << 60, "1MB", True])
def test_what_is_no_number_of_bytes_is_refused(daemon: Daemon, data: str, wrong: Any) -> None:
    with pytest.raises(InvalidInput, match="prepare_max_bytes"):
        opened(data, wrong)
