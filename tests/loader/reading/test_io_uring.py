"""Reads of many ranges in one system call: the bytes and errors of single reads, in threads and forked children."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from loader.reading import file_reads, io_uring
from loader.reading.file_reads import ANNOUNCED_BATCHES
from loader.reading.io_uring import Ring, ring_of_thread
from loader.reading.reader import ExtentReader
from tests.support.training.loader_fakes import MemoryGrants, MemoryLink

SIZE = 1 << 20

pytestmark = pytest.mark.skipif(ring_of_thread() is None, reason="NOT TESTED: this kernel forbids io_uring")


@pytest.fixture
def file(tmp_path: Path) -> Iterator[tuple[int, np.ndarray]]:
    """A file's descriptor and its bytes."""
    path = tmp_path / "file"
    values = np.random.default_rng(0).integers(0, 256, SIZE, np.uint8)
    values.tofile(path)
    fd = os.open(path, os.O_RDONLY)
    yield fd, values
    os.close(fd)


def check(ring: Ring, file: tuple[int, np.ndarray], count: int, seed: int) -> None:
    fd, values = file
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 5000, count)
    offsets = rng.integers(0, SIZE - 5000, count)
    places = rng.permutation(count) * 5000
    out = np.zeros(count * 5000, np.uint8)
    assert (ring.read(np.full(count, fd), offsets, lengths, out, places) == lengths).all()
    for offset, length, place in zip(offsets, lengths, places, strict=True):
        assert (out[place : place + length] == values[offset : offset + length]).all()
        assert not out[place + length : place + 5000].any()


@pytest.mark.parametrize("count", [1, 64, 256, 257, 1000])
def test_any_number_of_ranges_is_read(file: tuple[int, np.ndarray], count: int) -> None:
    ring = Ring()
    for seed in range(5):
        check(ring, file, count, seed)


def test_each_range_has_its_own_result(file: tuple[int, np.ndarray]) -> None:
    fds = np.array([file[0], 1 << 20, file[0], file[0]])
    offsets, out = np.array([SIZE - 10, 0, SIZE, 5]), np.zeros(400, np.uint8)
    found = Ring().read(fds, offsets, np.full(4, 100), out, np.arange(4) * 100)
    assert found.tolist() == [10, -errno.EBADF, 0, 100]


def test_threads_have_rings_of_their_own(file: tuple[int, np.ndarray]) -> None:
    def read(seed: int) -> Ring | None:
        ring = ring_of_thread()
        assert ring is not None
        for n in range(20):
            check(ring, file, 100, seed * 100 + n)
        return ring

    with ThreadPoolExecutor(3) as pool:
        assert len({*pool.map(read, range(3)), ring_of_thread()} - {None}) > 1


def test_a_forked_child_makes_its_own(file: tuple[int, np.ndarray]) -> None:
    ring = ring_of_thread()
    child = os.fork()
    if not child:
        own = ring_of_thread()
        assert own is not None
        check(own, file, 100, 1)
        os._exit(0 if own is not ring else 1)
    assert ring is not None
    check(ring, file, 100, 2)
    assert os.waitpid(child, 0)[1] == 0


def test_reads_left_by_an_interrupt_end_before_the_next(
    file: tuple[int, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    ring, call = Ring(), io_uring._call

    def interrupted(*arguments: int) -> int:
        monkeypatch.setattr(io_uring, "_call", call)
        call(*arguments[:3], 0, *arguments[4:])  # submits, and does not wait
        raise KeyboardInterrupt

    monkeypatch.setattr(io_uring, "_call", interrupted)
    with pytest.raises(KeyboardInterrupt):
        check(ring, file, 100, 1)
    check(ring, file, 60, 2)


@pytest.mark.parametrize("refused", ["at once", "later", "never"])
def test_a_reader_reads_the_same_with_and_without(
    sequences: tuple[MemoryLink, np.ndarray], monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    link, wanted = sequences
    catalog = link.catalog()
    reader = ExtentReader(catalog, MemoryGrants(catalog.extent, "nvme"))

    class Refusing:
        def read(self, *_: object) -> None:
            raise OSError(errno.EPERM, "not permitted")

    rings: list[object] = [{"at once": None, "later": Refusing(), "never": ring_of_thread()}[refused]]
    monkeypatch.setattr(file_reads, "ring_of_thread", lambda: rings[-1])
    monkeypatch.setattr(file_reads, "give_up_ring", lambda: rings.append(None))
    rng = np.random.default_rng(0)
    for _ in range(10):
        samples = rng.integers(0, catalog.samples, 64)
        addresses, lengths = (column[:, 0] for column in catalog.locate(samples))
        found = reader.read(addresses, lengths)
        assert [np.frombuffer(each or b"", "<u2").tolist() for each in found] == wanted[samples].tolist()
    assert len(rings) == 1 + (refused == "later")
    reader.close()


def test_ranges_are_announced_while_they_come_from_the_disk(
    sequences: tuple[MemoryLink, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    link, _ = sequences
    catalog = link.catalog()
    reader = ExtentReader(catalog, MemoryGrants(catalog.extent, "nvme"))
    addresses, lengths = (column[:, 0] for column in catalog.locate(np.arange(catalog.samples)))
    first, last = reader.spans(addresses, lengths)
    alone = np.flatnonzero(first == last)[:8]
    addresses, lengths = addresses[alone], lengths[alone]

    def announced(batches: int) -> int:
        """How many of so many batches are announced."""
        count = 0
        for _ in range(batches):
            if reader.reads_ahead:
                reader.expect(addresses, lengths)
                count += 1
            reader.read(addresses, lengths)
        return count

    monkeypatch.setattr(file_reads, "FROM_DISK_S", 1e9)
    reader.read(addresses, lengths)
    assert announced(10) == 0
    monkeypatch.setattr(file_reads, "FROM_DISK_S", 0.0)
    assert announced(2 * ANNOUNCED_BATCHES + 2) == 2 * ANNOUNCED_BATCHES
    monkeypatch.setattr(file_reads, "FROM_DISK_S", 1e9)
    assert announced(10 * ANNOUNCED_BATCHES) <= ANNOUNCED_BATCHES
    reader.close()
