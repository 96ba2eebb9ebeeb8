"""Small samples of local files are read from copies in this process's memory, and large ones in place."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cachesvc.catalog.catalog import Catalog
from cachesvc.client.protocol import Refused
from cachesvc.core.errors import SourceChanged
from cachesvc.core.order.epoch_order import Plan
from loader import DataLoader, open_dataset
from loader.reading.direct.direct_access import direct_access
from loader.reading.direct.local_copies import copy_budget
from loader.reading.direct.local_files import LocalGrants
from tests.support.datasets import array_file
from tests.support.training.loader_fakes import compiled
from tests.support.waiting import wait_until

COUNT, NUMBERS = 2000, 512
EXTENT = 64 << 10


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CACHESVC", "off")
    monkeypatch.setattr("loader.reading.changed_files.CHECK_EVERY_S", 0.0)
    array_file(tmp_path / "data/a.bin", np.repeat(np.arange(COUNT, dtype="<u4"), NUMBERS))
    return tmp_path / "data"


def loader(data: Path, record_bytes: int = 4 * NUMBERS, **arguments: Any) -> DataLoader[Any]:
    dataset = open_dataset(data, format="records", record_bytes=record_bytes, extent_bytes=EXTENT)
    return DataLoader(dataset, 8, **{"shuffle": True, "window": 4 * EXTENT, **arguments})


def numbers(batches: DataLoader[Any]) -> list[int]:
    return [n for batch in batches for n in batch.numpy().view("<u4")[:, 0].tolist()]


@pytest.mark.parametrize("arguments", [{}, {"num_workers": 2}, {"num_workers": 2, "worker_type": "thread"}])
def test_small_samples_come_from_copies_each_once(data: Path, arguments: dict[str, Any]) -> None:
    batches = loader(data, window=64 * EXTENT, persistent_workers=arguments != {}, **arguments)

    def copied() -> int:
        assert sorted(numbers(batches)) == list(range(COUNT))
        read = batches.stats().bytes_by_origin
        assert read["direct"] + read["local"] == COUNT * 4 * NUMBERS
        return read["direct"]

    # A file is read in place until its copy is filled. The budget holds all copies.
    wait_until(lambda: copied() == COUNT * 4 * NUMBERS)


def test_room_for_copies_is_made_by_the_reader(data: Path, tmp_path: Path) -> None:
    form = {"format": "records", "record_bytes": 4 * NUMBERS, "extent_bytes": EXTENT}
    catalog = compiled(data, tmp_path, **form).catalog()
    grants = direct_access(catalog).grants
    assert isinstance(grants, LocalGrants)
    grants.follow(range(4), 2 * int(catalog.extent_sizes[0]))

    def origin_of(extent: int) -> str:
        """Acquire an extent and return its origin, or "refused". A file is released at once, a copy is kept."""
        (answer,) = grants.acquire([extent], 10.0)
        if isinstance(answer, Refused):
            return "refused"
        os.close(answer.fd)
        assert answer.once == answer.brief == (answer.origin == "local")
        if answer.origin == "local":
            grants.release([extent])
        return answer.origin

    for extent in (0, 1):
        wait_until(lambda extent=extent: origin_of(extent) == "direct")
    assert [origin_of(2), origin_of(2), origin_of(2)] == ["refused", "local", "refused"]
    grants.release([0])
    wait_until(lambda: origin_of(2) == "direct")
    grants.close()


@pytest.mark.parametrize(
    "arguments", [{"rank": 0, "world_size": 4, "last": "drop"}, {"record_bytes": 4 * NUMBERS * 20}]
)
def test_files_are_read_in_place_for_a_small_part_and_for_large_samples(
    data: Path, arguments: dict[str, Any]
) -> None:
    batches = loader(data, **arguments)
    numbers(batches)
    read = batches.stats().bytes_by_origin
    assert read["local"] > 0
    assert read["direct"] == 0


def test_of_a_file_that_is_written_to_no_new_byte_is_read(data: Path) -> None:
    batches = loader(data)
    found = [
        n
        for batch, _ in zip(batches, range(20), strict=False)
        for n in batch.numpy().view("<u4")[:, 0].tolist()
    ]
    array_file(data / "a.bin", np.full(COUNT * NUMBERS, COUNT, "<u4"))
    with pytest.raises(SourceChanged, match=r"a\.bin"):
        found.extend(n for batch in batches for n in batch.numpy().view("<u4")[:, 0].tolist())
    assert COUNT not in found


def plan(catalog: Catalog, together: int) -> Plan:
    """A plan that reads so many extents side by side."""
    extents = np.arange(len(catalog.extent_sizes))
    step = extents // together
    return Plan(extents, step, step)


def test_the_budget_is_twice_what_is_read_side_by_side(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = {"format": "records", "record_bytes": 4 * NUMBERS, "extent_bytes": EXTENT}
    catalog = compiled(data, tmp_path, **form).catalog()
    size = int(catalog.extent_sizes[0])
    assert copy_budget(catalog, plan(catalog, 4), 1.0) == 8 * size
    assert copy_budget(catalog, plan(catalog, 4), 0.5) == 8 * size
    assert copy_budget(catalog, plan(catalog, 4), 0.25) == 0
    monkeypatch.setattr("loader.reading.direct.local_copies.DIRECT_BYTES", 8 * size - 1)
    assert copy_budget(catalog, plan(catalog, 4), 1.0) == 0
