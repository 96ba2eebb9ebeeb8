"""The loaded datasets of a daemon: limits, unloading, and the dataset of an extent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cachesvc.core.model import DatasetId, ExtentId
from cachesvc.daemon.datasets import (
    MAX_CACHED_EXTENTS,
    MAX_UNUSED,
    MAX_UNUSED_EXTENTS,
    Datasets,
    ServedDataset,
)
from cachesvc.daemon.residency import in_use
from tests.support.served_datasets import dataset


def made(folder: Path, executor: Any = None) -> Datasets:
    unused: Any = None
    return Datasets(str(folder), unused, unused, executor)


@pytest.fixture
def datasets(tmp_path: Path) -> Iterator[Datasets]:
    with closing(made(tmp_path)) as found:
        yield found


def test_catalogs_loaded_for_callers_that_left_are_released(tmp_path: Path) -> None:
    sealed: list[int] = []

    def read(_: Callable[[DatasetId], ServedDataset], wanted: DatasetId) -> Future[ServedDataset]:
        found: Future[ServedDataset] = Future()
        found.set_result(dataset(int(wanted, 16)))
        sealed.append(found.result().catalog_fd)
        return found

    datasets = made(tmp_path, SimpleNamespace(submit=read))
    for number in range(100):
        datasets.load(DatasetId(f"{number:032x}"))
    assert len(set(sealed)) <= 3, "each was closed, and its number given away again"
    datasets.close()


def test_an_extent_of_an_unloaded_dataset_is_found_in_a_later_one(datasets: Datasets) -> None:
    datasets.claimed, datasets.used = lambda _: False, lambda _: False
    old, new = dataset(1), replace(dataset(1), id=DatasetId("f" * 32))  # of one extent
    datasets.admit(old)
    for number in range(MAX_UNUSED + 1):
        datasets.admit(dataset(2 + number))
    assert datasets.known(old.id) is None
    datasets.admit(new)
    assert datasets.dataset_with(new.extent_ids[0]) == (new, 0)


def test_large_unused_datasets_are_unloaded_before_the_limit_of_datasets(datasets: Datasets) -> None:
    datasets.claimed, datasets.used = lambda _: False, lambda _: False
    large = [replace(dataset(number), sizes=(1,) * (MAX_UNUSED_EXTENTS // 2)) for number in range(1, 5)]
    for each in large:
        datasets.admit(each)
    assert datasets.all() == large[1:], "the latest, and as many extents before it"


def test_datasets_with_cached_extents_are_unloaded_beyond_their_own_limit(datasets: Datasets) -> None:
    large = [replace(dataset(number), sizes=(1,) * (MAX_CACHED_EXTENTS // 4)) for number in range(1, 8)]
    datasets.claimed, datasets.used = lambda each: each is large[0], lambda _: True
    for each in large:
        datasets.admit(each)
    assert datasets.all() == [large[0], *large[2:]], (
        "what is claimed, the latest, and as many extents before it"
    )


def test_files_opened_by_name_are_unloaded_though_their_extents_are_cached(datasets: Datasets) -> None:
    entries: dict[ExtentId, Any] = {}
    node: Any = SimpleNamespace(copies=SimpleNamespace(entries=entries), policy=SimpleNamespace(tiers={}))
    claimed = {7}
    datasets.claimed, datasets.used = lambda each: each.sizes[0] in claimed, partial(in_use, node)
    by_name: Any = SimpleNamespace(samples=1, format="objects", objects=1)
    files = [
        replace(dataset(number), catalog=by_name, sizes=(number,)) for number in range(1, 2 * MAX_UNUSED)
    ]
    for each in files:
        entries[each.extent_ids[0]] = SimpleNamespace(in_progress=each.sizes == (5,))
        datasets.admit(each)
    assert datasets.all()[:2] == [files[4], files[6]], "one is being filled, one is claimed"
    claimed.clear()
    entries[files[4].extent_ids[0]].in_progress = False
    datasets.unload_unclaimed()
    assert len(datasets.all()) == MAX_UNUSED
    listed: Any = SimpleNamespace(samples=1, format="objects", objects=2)
    assert in_use(node, replace(files[0], catalog=listed)), "a folder's listing stays"


def test_an_extent_is_found_in_a_claimed_dataset_first(datasets: Datasets) -> None:
    opened, read = dataset(1), replace(dataset(1), id=DatasetId("f" * 32))
    datasets.claimed = lambda each: each is read
    datasets.admit(opened)
    datasets.admit(read)
    assert datasets.dataset_with(read.extent_ids[0]) == (read, 0)


def test_an_extent_is_found_in_an_indexed_dataset_first(datasets: Datasets) -> None:
    unindexed: Any = SimpleNamespace(samples=0)
    provisional, indexed = replace(dataset(1), catalog=unindexed), replace(dataset(1), id=DatasetId("f" * 32))
    extent = indexed.extent_ids[0]
    assert datasets.dataset_with(extent) is None
    datasets.admit(provisional)
    assert datasets.dataset_with(extent) == (provisional, 0)
    datasets.admit(indexed)
    assert datasets.dataset_with(extent) == (indexed, 0)
