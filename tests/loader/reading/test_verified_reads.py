"""Verified reads of files that a fake grants: corrupt once, always, or without a footer yet."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from cachesvc.client.protocol import Granted
from cachesvc.core.errors import CorruptData
from cachesvc.core.limits import VERIFY_TRIES
from cachesvc.core.model import Extent
from cachesvc.tiers import footer
from cachesvc.tiers.checksum import StreamedChecksums
from loader.reading.reader import ExtentReader
from tests.support import datasets
from tests.support.training.loader_fakes import MemoryLink, compiled, extent_bytes

COMMIT_S = 0.05


class Files:
    """Grants of an NVMe tier: the extent, then its footer. The first `wrong` of each extent have a bit flipped; the
    footer of all is written `COMMIT_S` after the grant when `late`. `content`: the digest that grants state, if not that
    of the bytes."""

    def __init__(
        self, extent_of: Callable[[int], Extent], wrong: int = 0, late: bool = False, content: bytes = b""
    ) -> None:
        self._content = content
        self._extent_of, self._wrong, self._late = extent_of, wrong, late
        self.granted: dict[int, int] = {}
        self.suspected: list[int] = []
        self.leases: set[int] = set()

    def acquire(self, extents: Sequence[int], timeout_s: float) -> list[Granted]:
        return [self._grant(index) for index in extents]

    def _grant(self, index: int) -> Granted:
        assert index not in self.leases, "leased twice"
        self.leases.add(index)
        extent = self._extent_of(index)
        body = bytearray(extent_bytes(extent))
        fd = os.memfd_create("test", os.MFD_CLOEXEC)
        passing = StreamedChecksums(len(body))
        passing.add(0, memoryview(body))
        checksums = passing.checksums(fd)
        tail = footer.encode(extent.id, checksums)
        self.granted[index] = self.granted.get(index, 0) + 1
        if self.granted[index] <= self._wrong:
            body[-1] ^= 1
        os.pwrite(fd, body, 0)
        if self._late:
            own = os.dup(fd)
            threading.Timer(COMMIT_S, lambda: (os.pwrite(own, tail, len(body)), os.close(own))).start()
        else:
            os.pwrite(fd, tail, len(body))
        content = self._content or checksums.content
        return Granted(index, fd, 0, len(body), "nvme", content=content)

    def suspect(self, extents: Sequence[int]) -> None:
        assert self.leases.issuperset(extents), "suspected after the release"
        self.suspected += extents

    def release(self, extents: Sequence[int]) -> None:
        self.leases.difference_update(extents)

    def passed(self, step: int) -> None: ...

    def close(self) -> None: ...


@pytest.fixture(scope="module")
def blobs(tmp_path_factory: pytest.TempPathFactory) -> tuple[MemoryLink, dict[str, bytes]]:
    """Files of 1 B to 400 KB in extents of 256 KiB: within a block, over blocks, over extents."""
    root = tmp_path_factory.mktemp("blobs")
    rng = np.random.default_rng(1)
    files = {f"{n:03d}.bin": rng.bytes(int(rng.integers(1, 400_000 if n % 5 else 50))) for n in range(30)}
    datasets.write_files(root / "data", files)
    return compiled(root / "data", root, format="files", extent_bytes=256 << 10), files


def read_all(link: MemoryLink, files: dict[str, bytes], grants: Files) -> None:
    catalog = link.catalog()
    reader = ExtentReader(catalog, grants, suspect=grants.suspect, verify=True)  # type: ignore[arg-type]
    order = np.random.default_rng(2).permutation(catalog.samples)
    addresses, lengths = catalog.locate(order)
    assert reader.read(addresses[:, 0], lengths[:, 0]) == [files[catalog.key(int(n))] for n in order]
    reader.close()


@pytest.mark.parametrize(("wrong", "late"), [(0, False), (0, True), (1, False), (VERIFY_TRIES - 1, True)])
def test_what_is_wrong_is_suspected_released_and_asked_for_again(
    blobs: tuple[MemoryLink, dict[str, bytes]], wrong: int, late: bool
) -> None:
    link, files = blobs
    grants = Files(link.catalog().extent, wrong, late)
    read_all(link, files, grants)
    assert set(grants.granted.values()) == {wrong + 1}
    assert sorted(grants.suspected) == sorted(list(grants.granted) * wrong)
    assert not grants.leases


def test_an_extent_that_is_always_corrupt_is_a_typed_error(
    blobs: tuple[MemoryLink, dict[str, bytes]],
) -> None:
    link, files = blobs
    with pytest.raises(CorruptData, match=f"in {VERIFY_TRIES} reads"):
        read_all(link, files, Files(link.catalog().extent, VERIFY_TRIES))


def test_a_file_of_other_bytes_than_those_that_were_granted_is_wrong(
    blobs: tuple[MemoryLink, dict[str, bytes]],
) -> None:
    """So the digest of a run is of the bytes that were read, under `verify`."""
    link, files = blobs
    with pytest.raises(CorruptData, match=f"in {VERIFY_TRIES} reads"):
        read_all(link, files, Files(link.catalog().extent, content=bytes(16)))


def test_threads_that_share_a_wrong_extent_each_get_it_right(
    blobs: tuple[MemoryLink, dict[str, bytes]],
) -> None:
    link, files = blobs
    catalog = link.catalog()
    grants = Files(catalog.extent, 1)
    reader = ExtentReader(catalog, grants, suspect=grants.suspect, verify=True)  # type: ignore[arg-type]
    everything = np.arange(catalog.samples)
    addresses, lengths = catalog.locate(everything)
    wanted = [files[catalog.key(int(n))] for n in everything]
    right: list[bool] = []

    def read() -> None:
        right.append(reader.read(addresses[:, 0], lengths[:, 0]) == wanted)

    threads = [threading.Thread(target=read) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [True] * 6
    assert set(grants.granted.values()) == {2}
    reader.close()
