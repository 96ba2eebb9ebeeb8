"""Gathering by a device, with the processor in the device's place: the same batches, and extents that stay registered
as long as they are read."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loader import DataLoader
from loader.batches.gather import GatherMethod
from loader.datasets.dataset import Dataset
from loader.datasets.record_form import RecordForm
from loader.gpu.host_view import host_rows
from loader.gpu.record_gather import HostRecords, RecordGather
from loader.gpu.registered_extents import registered_extents
from loader.reading.reader import Ints
from tests.support import datasets
from tests.support.training.loader_fakes import MemoryLink, compiled, in_memory

COUNT, EXTENT = 96, 8192
EVERYTHING = 1 << 30


class Processor:
    """Gathers as a GPU does, and checks that what it reads is registered."""

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

    def upload(self, slots: Ints) -> torch.Tensor:
        self.gathered += len(slots)
        return torch.from_numpy(slots.copy())

    @contextmanager
    def working(self) -> Iterator[None]:
        assert self.registered
        yield
        assert self.registered


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


def gathering(loader: DataLoader, device: Processor, limit_bytes: int) -> Any:
    """The feed of a loader whose batches the device gathers."""
    feed = loader._prepared().feed
    samples = feed.gathered
    assert samples is not None
    assert samples.record_form is not None
    own = RecordGather(samples, samples.record_form, device, limit_bytes)
    feed.gather_by(GatherMethod(own.locate, own.make))
    return feed


def tensors(batch: Any) -> list[torch.Tensor]:
    return (
        [batch]
        if isinstance(batch, torch.Tensor)
        else list(batch.values() if isinstance(batch, dict) else batch)
    )


@pytest.mark.parametrize("form", FORMS)
def test_the_device_makes_the_batches_of_the_processor(tmp_path: Path, form: str) -> None:
    options, spec = FORMS[form]
    link, device = records(tmp_path, **options), Processor()
    plain = DataLoader(in_memory(link, **spec), batch_size=7, shuffle=True, window="all")
    feed = gathering(
        DataLoader(in_memory(link, **spec), batch_size=7, shuffle=True, window="all"), device, EVERYTHING
    )
    for turn, expected in enumerate(plain):
        found = feed[0, turn]
        assert type(found) is type(expected)
        for ours, theirs in zip(tensors(found), tensors(expected), strict=True):
            assert (ours.dtype, ours.shape, ours.is_contiguous()) == (theirs.dtype, theirs.shape, True)
            assert torch.equal(ours, theirs)
    before = device.gathered  # the processor makes the batches in which an extent is leased
    for turn in range(len(plain)):
        feed[0, turn]
    assert device.gathered - before >= COUNT


def test_extents_are_registered_up_to_the_limit(tmp_path: Path) -> None:
    link, device, limit = records(tmp_path, format="records", dtype="(512,)u4"), Processor(), 3 * EXTENT
    loader = DataLoader(in_memory(link), batch_size=4, shuffle=True, window=EXTENT)
    feed = gathering(loader, device, limit)
    seen = [int(row[0]) // 512 for turn in range(COUNT // 4) for row in feed[0, turn]]
    assert sorted(seen) == list(range(COUNT))
    assert device.gathered == 0  # a slab of the order spans more extents than the limit allows
    short = DataLoader(in_memory(link).select(range(8)), batch_size=4, shuffle=True)
    feed = gathering(short, device, limit)
    for _ in range(2):
        for turn in range(2):
            feed[0, turn]
    assert device.gathered >= 8
    assert device.most_bytes <= limit


def test_a_given_up_extent_is_unregistered_before_it_is_unmapped(tmp_path: Path) -> None:
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
    with registered.using([0]) as first, registered.using([1]) as second, registered.using([2]) as third:
        assert (first, second, third) == (True, True, False)
    with registered.using([0]), registered.using([2]) as fits:
        assert fits
        assert registered.registered_bytes == 2 * EXTENT
    assert reader.place_of(1)[0] not in device.registered


def test_a_driver_that_refuses_is_told_once_and_the_processor_gathers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    link, device = records(tmp_path, format="records", dtype="(512,)u4"), Processor(refuses=True)
    feed = gathering(DataLoader(in_memory(link), batch_size=8), device, EVERYTHING)
    for _ in range(3):
        for turn in range(COUNT // 8):
            assert int(feed[0, turn][0, 0]) == turn * 8 * 512
    assert (device.gathered, caplog.text.count("pinned_bytes has no effect")) == (0, 1)


def test_threads_share_registrations(tmp_path: Path) -> None:
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
    assert reader() is None
    assert kept() is None


def test_views_of_host_memory_may_die_in_any_order() -> None:
    memory = np.zeros(4096, np.uint8)
    for _ in range(1000):
        views = [host_rows(memory.ctypes.data, 8, 64, 24, 8, torch.device("cpu")) for _ in range(3)]
        kept = views[1][2:]
        del views
        gc.collect(0)
        assert kept.shape == (6, 3)
