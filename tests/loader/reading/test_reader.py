"""Extents to bytes: mapped memory, files, little room, forks."""

from __future__ import annotations

import errno
import itertools
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cachesvc.catalog.catalog import Catalog
from cachesvc.catalog.layout import Fixed
from cachesvc.client.keepalive import stop_polling
from cachesvc.core.errors import (
    OutOfSpace,
)
from cachesvc.system import mapping
from cachesvc.system.memory import Memory
from loader.reading.io_uring import ring_of_thread
from loader.reading.opened_dataset import Recalls
from loader.reading.reader import ExtentReader
from tests.support.descriptors import descriptors
from tests.support.training.loader_fakes import MemoryGrants, MemoryLink, in_memory
from tests.support.waiting import wait_until


def gathered(reader: ExtentReader, catalog: Catalog, samples: np.ndarray) -> np.ndarray:
    """The tokens of the samples, a row each."""
    layout = catalog.layout
    assert isinstance(layout, Fixed)
    slots = layout.slots(samples)
    first, last = reader.spans(slots * layout.stride_bytes, np.full(len(slots), layout.record_bytes))
    return reader.gather(slots, first, last).view("<u2").reshape(len(slots), -1)


@pytest.mark.parametrize("origin", ["ram", "nvme"])
@pytest.mark.parametrize("limit", [1 << 30, 20_000, 0])
def test_records_that_span_extents_are_read_right_from_memory_and_files(
    sequences: tuple[MemoryLink, np.ndarray], origin: str, limit: int
) -> None:
    link, wanted = sequences
    catalog = link.catalog()
    ring_of_thread()  # a thread keeps its ring
    before = descriptors()
    reader = ExtentReader(catalog, MemoryGrants(catalog.extent, origin), limit)
    rng = np.random.default_rng(0)
    for count in (1, 7, 64, 300):
        samples = rng.integers(0, catalog.samples, count)
        assert (gathered(reader, catalog, samples) == wanted[samples]).all()
    assert reader.origin_bytes()[origin] == 372 * wanted[0].nbytes
    reader.close()
    wait_until(lambda: descriptors() <= before)


def test_mappings_released_while_threads_read_are_leased_again(
    sequences: tuple[MemoryLink, np.ndarray],
) -> None:
    link, wanted = sequences
    catalog = link.catalog()
    grants = MemoryGrants(catalog.extent)
    reader, over = ExtentReader(catalog, grants), threading.Event()

    def read(seed: int) -> bool:
        rng, right = np.random.default_rng(seed), True
        while not over.is_set():
            samples = rng.integers(0, catalog.samples, 64)
            right = right and bool((gathered(reader, catalog, samples) == wanted[samples]).all())
        return right

    with ThreadPoolExecutor(3) as pool:
        reads = [pool.submit(read, seed) for seed in range(3)]
        while grants.calls < 40 and not any(one.done() for one in reads):
            reader.release_unused_mappings()
        over.set()
    assert all(one.result() for one in reads)
    reader.release_unused_mappings()
    assert not any(grants.leases.values())
    reader.close()


def test_unused_mappings_are_released_only_while_memory_is_short(
    sequences: tuple[MemoryLink, np.ndarray],
) -> None:
    link, wanted = sequences
    catalog = link.catalog()
    grants, memory = MemoryGrants(catalog.extent), [Memory(1000, 51)]
    reader = ExtentReader(catalog, grants)
    recalls = Recalls(dict, reader, lambda: memory[0])

    def read() -> bool:
        return bool((gathered(reader, catalog, np.arange(64)) == wanted[:64]).all())

    assert read()
    recalls.poll()
    assert any(grants.leases.values())
    memory[0] = Memory(1000, 49)
    recalls.poll()
    assert not any(grants.leases.values())
    assert read()
    stop_polling(recalls)
    reader.close()


@pytest.mark.parametrize(
    ("origin", "limit", "room"), [("ram", 1 << 30, 999), ("ram", 9000, 999), ("nvme", 0, 3)]
)
def test_files_of_any_size_are_read_right_from_memory_and_files(
    blobs: tuple[MemoryLink, dict[str, bytes]], origin: str, limit: int, room: int
) -> None:
    link, files = blobs
    catalog = link.catalog()
    grants = MemoryGrants(catalog.extent, origin, max(room, 4))
    reader = ExtentReader(catalog, grants, limit)
    order = np.random.default_rng(2).permutation(catalog.samples)
    addresses, lengths = catalog.locate(order)
    found = reader.read(addresses[:, 0], lengths[:, 0])
    assert found == [files[catalog.key(int(n))] for n in order]
    reader.close()
    assert not grants.leases


def test_extents_that_cannot_be_mapped_are_read_from_their_descriptors(
    sequences: tuple[MemoryLink, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    link, wanted = sequences
    catalog = link.catalog()
    place, asked = mapping.place, itertools.count()

    def short(
        address: int, size_bytes: int, protection: int, flags: int, fd: int = -1, offset: int = 0
    ) -> int:
        if fd >= 0 and next(asked) % 2:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return place(address, size_bytes, protection, flags, fd, offset)

    monkeypatch.setattr(mapping, "place", short)
    before, grants = descriptors(), MemoryGrants(catalog.extent, "ram")
    reader = ExtentReader(catalog, grants)
    assert (gathered(reader, catalog, np.arange(catalog.samples)) == wanted).all()
    assert next(asked) > 4
    reader.close()
    assert not grants.leases
    wait_until(lambda: descriptors() <= before)


def test_a_sample_larger_than_all_room_is_a_typed_error(blobs: tuple[MemoryLink, dict[str, bytes]]) -> None:
    link, files = blobs
    catalog = link.catalog()
    large = max(range(catalog.samples), key=lambda n: len(files[catalog.key(n)]))
    addresses, lengths = catalog.locate(np.asarray([large]))
    reader = ExtentReader(catalog, MemoryGrants(catalog.extent, "ram", 1), timeout_s=0.1)
    with pytest.raises(OutOfSpace, match="--ram"):
        reader.read(addresses[:, 0], lengths[:, 0])


def test_a_forked_child_reads_right_bytes_and_keeps_nothing(
    sequences: tuple[MemoryLink, np.ndarray],
) -> None:
    link, wanted = sequences
    dataset = in_memory(link)
    assert (dataset[3].numpy() == wanted[3]).all()
    child = os.fork()
    if child == 0:
        right = bool((dataset[7].numpy() == wanted[7]).all())
        os._exit(0 if right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (dataset[3].numpy() == wanted[3]).all()


@pytest.mark.parametrize("origin", ["ram", "nvme"])
def test_a_dataset_without_references_leaves_no_descriptor_or_mapping(
    sequences: tuple[MemoryLink, np.ndarray], origin: str
) -> None:
    link, wanted = sequences

    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:test")

    before = descriptors(), mapped()
    for _ in range(3):
        dataset = in_memory(replace(link, origin=origin))
        assert (dataset.take(5)[3].numpy() == wanted[3]).all()
        rest = dataset.take(3)
        del dataset
        assert (rest[1].numpy() == wanted[1]).all()
        del rest
        wait_until(lambda: descriptors() <= before[0])
        assert mapped() <= before[1]
    array = in_memory(link).array()
    assert array[3, 0] == wanted[3, 0]


@pytest.mark.parametrize("origin", ["ram", "nvme"])
def test_expect_requests_no_extent_and_changes_no_byte(
    sequences: tuple[MemoryLink, np.ndarray], origin: str
) -> None:
    link, wanted = sequences
    catalog = link.catalog()
    grants = MemoryGrants(catalog.extent, origin)
    reader = ExtentReader(catalog, grants)
    rng = np.random.default_rng(4)
    batches = [rng.integers(0, catalog.samples, 32) for _ in range(12)]
    for samples, following in itertools.pairwise(batches):
        addresses, lengths = catalog.locate(following)
        asked = grants.calls
        reader.expect(addresses[:, 0], lengths[:, 0])
        assert grants.calls == asked, "what is not held is not asked for ahead"
        addresses, lengths = catalog.locate(samples)
        found = reader.read(addresses[:, 0], lengths[:, 0])
        assert found == [row.tobytes() for row in wanted[samples]]
    assert origin == "nvme" or not reader.reads_ahead
    reader.close()
    assert not grants.leases
