"""Gathering by a device, with the processor in the device's place: the same batches, and extents that stay registered
as long as they are read."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loader import DataLoader
from loader.datasets.dataset import Dataset
from loader.datasets.samples.records import RecordForm
from loader.gpu import record_gather
from loader.gpu.host_view import host_rows
from loader.gpu.record_gather import HostRecords, RecordGather
from loader.gpu.registered_extents import registered_extents
from tests.support import datasets
from tests.support.training.loader_fakes import MemoryLink, compiled, in_memory
from tests.support.waiting import wait_until

COUNT, EXTENT = 96, 8192
EVERYTHING = 1 << 30


class Processor:
    """Stands for a GPU."""

    device = torch.device("cpu")

    def __init__(self, refuses: bool = False) -> None:
        self.registered: dict[int, int] = {}
        self.most_bytes, self.gathered, self._refuses = 0, 0, refuses

    def register(self, address: int, size_bytes: int) -> None:
        if self._refuses:
            raise RuntimeError("no more memory can be pinned")
        assert address not in self.registered
        self.registered[address] = size_bytes
        self.most_bytes = max(self.most_bytes, sum(self.registered.values()))

    def unregister(self, address: int) -> None:
        del self.registered[address]

    def working(self, ahead: bool = False) -> AbstractContextManager[None]:
        return nullcontext()


class CheckedRecords(HostRecords):
    """Checks that what is read is registered."""

    def __init__(self, processor: Processor, form: RecordForm, address: int, *rest: Any) -> None:
        super().__init__(form, address, *rest)
        self._processor, self._form, self._address = processor, form, address

    def gather(self, slots: torch.Tensor) -> torch.Tensor:
        begin = self._address + slots.numpy() * self._form.stride_bytes
        for at in (begin, begin + self._form.record_bytes - 1):  # no record spans three extents
            places = self._processor.registered.items()
            within = [(at >= address) & (at < address + size_bytes) for address, size_bytes in places]
            assert np.any(within, axis=0).all()
        self._processor.gathered += len(slots)
        return super().gather(slots)


def records(root: Path, **options: Any) -> MemoryLink:
    datasets.array_file(root / "r.bin", np.arange(COUNT * 512, dtype="<u4"))
    return compiled(root / "r.bin", root, extent_bytes=EXTENT, **options)


FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "rows": ({"format": "records", "dtype": "(512,)u4"}, {}),
    "converted": ({"format": "records", "dtype": "(512,)u4"}, {"out": "int64"}),
    "odd": ({"format": "records", "record_bytes": 77}, {}),
    "tokens": ({"format": "tokens", "dtype": "uint16", "seq_len": 100}, {}),
    "shifted": (
        {"format": "tokens", "dtype": "uint16", "seq_len": 64, "overlap": 1},
        {"targets": "shifted"},
    ),
    "unshifted": ({"format": "tokens", "dtype": "uint16", "seq_len": 64}, {"targets": "unshifted"}),
}


Gathering = Callable[[DataLoader, Processor, int], Any]


@pytest.fixture
def gathering(monkeypatch: pytest.MonkeyPatch) -> Gathering:
    """Returns the feed of a loader whose batches the device gathers, out of at most `limit` bytes."""

    def feed_of(loader: DataLoader, device: Processor, limit_bytes: int) -> Any:
        monkeypatch.setattr(record_gather, "HostRecords", partial(CheckedRecords, device))
        feed = loader._prepared().feed
        assert feed.records is not None
        feed.on_device = RecordGather(feed.records, feed.share, device, limit_bytes).batch
        return feed

    return feed_of


def tensors(batch: Any) -> list[torch.Tensor]:
    return (
        [batch]
        if isinstance(batch, torch.Tensor)
        else list(batch.values() if isinstance(batch, dict) else batch)
    )


ORDERS: dict[str, dict[str, Any]] = {
    "random": {"shuffle": True, "window": "all"},
    "windows": {"shuffle": True, "window": 2 * EXTENT},
    "in order": {"last": "short"},
    "one rank of two, micro-batches": {"shuffle": True, "rank": 1, "world_size": 2, "global_batch_size": 42},
}


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("part", ["all", "some", "some, mixed"])
def test_the_device_makes_the_batches_of_the_processor(
    tmp_path: Path, gathering: Gathering, form: str, order: str, part: str
) -> None:
    options, spec = FORMS[form]
    link, device = records(tmp_path, **options), Processor()

    def loader() -> DataLoader:
        data = in_memory(link, **spec)
        if part != "all":
            chosen = [index for index in range(len(data)) if index % 5 != 2]
            data = data.select(chosen if part == "some" else chosen[::-1])
        return DataLoader(data, batch_size=7, **ORDERS[order])

    plain, feed = loader(), gathering(loader(), device, EVERYTHING)
    for epoch in range(3):
        for turn, expected in enumerate(plain):
            found = feed[epoch, turn]
            assert type(found) is type(expected)
            for ours, theirs in zip(tensors(found), tensors(expected), strict=True):
                assert (ours.dtype, ours.shape, ours.is_contiguous()) == (theirs.dtype, theirs.shape, True)
                assert torch.equal(ours, theirs)
    # the processor makes the batches in which an extent is leased
    assert device.gathered >= feed.order(0).full_steps * 7


@pytest.mark.parametrize("window", [2 * EXTENT, "all"])
def test_windows_are_registered_up_to_the_limit_and_others_left_to_the_processor(
    tmp_path: Path, gathering: Gathering, window: Any
) -> None:
    link, device, limit = records(tmp_path, format="records", dtype="(512,)u4"), Processor(), 3 * EXTENT
    feed = gathering(DataLoader(in_memory(link), 4, shuffle=True, window=window), device, limit)
    for epoch in range(2):
        seen = [int(row[0]) // 512 for turn in range(COUNT // 4) for row in feed[epoch, turn]]
        assert sorted(seen) == list(range(COUNT))
    if window == "all":
        assert (device.gathered, device.registered) == (0, {})
    else:
        assert device.gathered >= COUNT // 2
        assert 2 * EXTENT <= device.most_bytes <= limit


def test_a_given_up_extent_is_unregistered_before_it_is_unmapped(
    tmp_path: Path, gathering: Gathering
) -> None:
    link, device = records(tmp_path, format="records", dtype="(512,)u4"), Processor()
    data: Dataset = in_memory(link)
    feed = gathering(DataLoader(data, batch_size=COUNT), device, EVERYTHING)
    for _ in range(2):
        feed[0, 0]
    reader = data.opened.reader()
    places = [reader.place_of(extent)[0] for extent in range(len(data.catalog.extent_starts))]
    assert sorted(device.registered) == places
    reader.release_when_unused([1, 3])  # as a recall does
    assert sorted(device.registered) == [place for n, place in enumerate(places) if n not in (1, 3)]
    found = [feed[0, 0] for _ in range(2)]
    assert torch.equal(*found)
    assert sorted(device.registered) == places
    data.close()
    assert not device.registered
    feed[0, 0]
    feed[0, 0]
    assert len(device.registered) == len(places)


def test_extents_in_use_stay_registered(tmp_path: Path) -> None:
    link, device = records(tmp_path, format="records", dtype="(512,)u4"), Processor()
    reader = in_memory(link).opened.reader()
    registered = registered_extents(reader, 2 * EXTENT, device.register, device.unregister)
    assert registered is registered_extents(reader, EVERYTHING, device.register, device.unregister)
    zero, one, two = (np.array([extent]) for extent in range(3))
    with registered.using(zero) as first, registered.using(one) as second, registered.using(two) as third:
        assert (first, second, third) == (True, True, False)
    with registered.using(zero), registered.using(two) as fits:
        assert fits
        assert registered.registered_bytes == 2 * EXTENT
    assert reader.place_of(1)[0] not in device.registered


def test_a_driver_that_refuses_is_told_once_and_the_processor_gathers(
    tmp_path: Path, gathering: Gathering, caplog: pytest.LogCaptureFixture
) -> None:
    link, device = records(tmp_path, format="records", dtype="(512,)u4"), Processor(refuses=True)
    feed = gathering(DataLoader(in_memory(link), batch_size=8), device, EVERYTHING)
    for _ in range(3):
        for turn in range(COUNT // 8):
            assert int(feed[0, turn][0, 0]) == turn * 8 * 512
    assert (device.gathered, caplog.text.count("pinned_bytes has no effect")) == (0, 1)


def test_threads_share_registrations(tmp_path: Path, gathering: Gathering) -> None:
    link, device = records(tmp_path, format="records", dtype="(512,)u4"), Processor()
    data = in_memory(link)
    feeds = [gathering(DataLoader(data, batch_size=8, shuffle=True), device, EVERYTHING) for _ in range(3)]

    def epoch_of(feed: Any) -> list[list[int]]:
        return [row.tolist() for turn in range(COUNT // 8) for row in feed[0, turn]]

    with ThreadPoolExecutor(3) as pool:
        epochs = list(pool.map(epoch_of, feeds))
    assert epochs[0] == epochs[1] == epochs[2]
    assert sorted(epochs[0]) == np.arange(COUNT * 512).reshape(COUNT, 512).tolist()


@given(
    record_bytes=st.integers(1, 70),
    stride_bytes=st.integers(1, 70),
    rows=st.integers(1, 20),
    data=st.data(),
)
def test_records_of_any_size_and_stride(
    record_bytes: int, stride_bytes: int, rows: int, data: st.DataObject
) -> None:
    space = np.random.default_rng(0).integers(0, 256, (rows - 1) * stride_bytes + record_bytes, np.uint8)
    aligned = np.empty(len(space) + 8, np.uint8)
    aligned = aligned[-aligned.ctypes.data % 8 :][: len(space)]
    aligned[:] = space
    form = RecordForm(record_bytes, stride_bytes, torch.uint8, (record_bytes,), None, None)
    slots = data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=30))
    found = HostRecords(form, aligned.ctypes.data, len(aligned), torch.device("cpu")).gather(
        torch.tensor(slots)
    )
    expected = [space[slot * stride_bytes :][:record_bytes].tolist() for slot in slots]
    assert found.view(torch.uint8).tolist() == expected


def test_registered_extents_die_with_their_reader(tmp_path: Path) -> None:
    link, device = records(tmp_path, format="records", dtype="(512,)u4"), Processor()
    data = in_memory(link)
    registered = registered_extents(data.opened.reader(), EVERYTHING, device.register, device.unregister)
    reader, kept = weakref.ref(data.opened.reader()), weakref.ref(registered)
    del registered
    gc.collect()
    assert kept() is not None  # another loader over the reader finds it
    data.close()
    del data
    gc.collect()
    wait_until(lambda: gc.collect() >= 0 and reader() is None)  # a thread may poll it just now
    assert kept() is None


def test_views_of_host_memory_may_die_in_any_order() -> None:
    memory = np.zeros(4096, np.uint8)
    for _ in range(1000):
        views = [host_rows(memory.ctypes.data, 8, 64, 24, 8, torch.device("cpu")) for _ in range(3)]
        kept = views[1][2:]
        del views
        gc.collect(0)
        assert kept.shape == (6, 3)
