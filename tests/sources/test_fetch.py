"""A fetch writes the pieces of an extent at their offsets, or fails with an error that names the object."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from cachesvc.config import SourceSection
from cachesvc.core.errors import CorruptData, InvalidInput, NotFound, SourceChanged, TierFailed
from cachesvc.core.model import ObjectVersion, Piece, extent_of
from cachesvc.sources.fetch import Fetcher
from cachesvc.sources.files import FilesSource
from cachesvc.sources.s3.s3 import open_s3
from cachesvc.sources.source import OnReceived, ignore_received
from testbed import WAIT_S
from testbed.servers import Proxy, SeaweedFS
from tests.support.reads import FakeSource


@pytest.fixture
def fetcher() -> Iterator[Fetcher]:
    source = FilesSource()
    found = Fetcher(lambda _: source, threads=8, part_bytes=1 << 16)
    yield found
    found.close()


def _stored(path: Path, data: bytes) -> ObjectVersion:
    path.write_bytes(data)
    return FilesSource().head(str(path))


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 200_000), st.booleans()), min_size=0, max_size=8), st.integers(0, 99)
)
def test_pieces_are_concatenated(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[tuple[int, bool]], seed: int
) -> None:
    folder, rng = tmp_path_factory.mktemp("pieces"), random.Random(seed)
    pieces, wanted = [], b""
    for number, (size, encoded) in enumerate(sizes):
        data = rng.randbytes(size)
        if encoded:
            raw = zstandard.compress(data[: size // 2]) + zstandard.compress(data[size // 2 :])
            pieces.append(Piece(_stored(folder / str(number), raw), 0, size, "zstd:7"))
        else:
            offset = rng.randint(0, size)
            pieces.append(Piece(_stored(folder / str(number), data), offset, size - offset))
            data = data[offset:]
        wanted += data
    source, fd = FilesSource(), os.memfd_create("target", os.MFD_CLOEXEC)
    fetcher = Fetcher(lambda _: source, threads=4, part_bytes=1 << 15)
    try:
        fetcher.fetch(extent_of(pieces), fd)
        assert os.pread(fd, len(wanted) + 1, 0) == wanted
    finally:
        fetcher.close()
        os.close(fd)


def test_a_decoded_object_must_have_its_announced_length(
    fetcher: Fetcher, target: int, tmp_path: Path
) -> None:
    raw = zstandard.compress(bytes(50 << 20))
    bomb = _stored(tmp_path / "bomb", raw)
    with pytest.raises(CorruptData, match="more than the 1000 bytes"):
        fetcher.fetch(extent_of([Piece(bomb, 0, 1000, "zstd")]), target)
    assert os.fstat(target).st_size <= 1000
    with pytest.raises(CorruptData, match="not the"):
        fetcher.fetch(extent_of([Piece(bomb, 0, (50 << 20) + 1, "zstd")]), target)
    for name, damage in (("cut", raw[:-9]), ("noise", b"noise" * 9), ("empty", b"")):
        with pytest.raises(CorruptData, match=name):
            fetcher.fetch(extent_of([Piece(_stored(tmp_path / name, damage), 0, 50 << 20, "zstd")]), target)
    with pytest.raises(InvalidInput, match="lzma"):
        fetcher.fetch(extent_of([Piece(bomb, 0, 1000, "lzma")]), target)


@pytest.mark.parametrize("piece", [("zstd", 4096, 0), ("parquet", 4096, 5 << 30)], ids=["zstd", "parquet"])
def test_an_encoded_object_far_larger_than_its_data_is_not_fetched(
    tmp_path: Path, fetcher: Fetcher, target: int, piece: tuple[str, int, int]
) -> None:
    """It would be held in memory until it is decoded, and a sparse file of some GiB costs its writer nothing."""
    codec, length, stored = piece
    (tmp_path / "x").touch()
    os.truncate(tmp_path / "x", 6 << 30)
    version = FilesSource().head(str(tmp_path / "x"))
    with pytest.raises(CorruptData, match="at most are read"):
        fetcher.fetch(extent_of([Piece(version, 0, length, codec, stored)]), target)


def test_the_first_failure_is_raised_and_the_fetcher_goes_on(
    fetcher: Fetcher, target: int, tmp_path: Path
) -> None:
    fine = _stored(tmp_path / "fine", bytes(1 << 20))
    for broken, kind in (
        (ObjectVersion(f"{tmp_path}/gone", 9, ""), NotFound),
        (ObjectVersion(fine.uri, 9, ""), SourceChanged),
    ):
        with pytest.raises(kind):
            fetcher.fetch(
                extent_of([Piece(fine, 0, 1 << 20), *(Piece(broken, at, 3) for at in (0, 3, 6))]), target
            )
    fetcher.fetch(extent_of([Piece(fine, 0, 1 << 20)]), target)
    with pytest.raises(TierFailed):
        fetcher.fetch(extent_of([Piece(fine, 0, 1 << 20)]), os.open("/dev/null", os.O_RDONLY))


class Slow(FakeSource):
    """A source that counts concurrent reads."""

    reading = 0

    def read_into(
        self, version: ObjectVersion, offset: int, into: memoryview, received: OnReceived = ignore_received
    ) -> None:
        self.reading += 1
        time.sleep(0.02)
        into[:] = bytes([offset // len(into)]) * len(into)
        self.reading -= 1


class Talkative(Slow):
    """A source that delivers the last range only after its checker was requested."""

    def __init__(self, parts: int) -> None:
        self._left, self._asked = parts, threading.Event()

    def read_into(
        self, version: ObjectVersion, offset: int, into: memoryview, received: OnReceived = ignore_received
    ) -> None:
        self._left -= 1
        assert self._left or self._asked.wait(WAIT_S), "asked only once everything was there"
        super().read_into(version, offset, into)

    def checker(self, version: ObjectVersion) -> None:
        self._asked.set()


def test_a_checksum_is_requested_while_the_object_is_read(target: int) -> None:
    source = Talkative(parts=4)
    fetcher = Fetcher(lambda _: source, threads=8, part_bytes=100)
    fetcher.fetch(extent_of([Piece(ObjectVersion("s3://b/x", 400, ""), 0, 400)]), target)
    fetcher.close()


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_a_fetch_goes_on_when_no_more_threads_can_start(
    monkeypatch: pytest.MonkeyPatch, target: int, limit: int
) -> None:
    start, started = threading.Thread.start, 0

    def bounded(thread: threading.Thread) -> None:
        nonlocal started
        if thread.name.startswith("fetch") and (started := started + 1) > limit:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", bounded)
    source = Slow()
    fetcher = Fetcher(lambda _: source, threads=8, part_bytes=100)
    fetcher.fetch(extent_of([Piece(ObjectVersion("s3://b/x", 2000, ""), 0, 2000)]), target)
    assert source.reading == 0
    assert os.pread(target, 2001, 0) == b"".join(bytes([part]) * 100 for part in range(20))
    fetcher.close()


def test_a_fetch_sends_one_get_for_each_part(
    s3_env: dict[str, str], s3_server: SeaweedFS, proxy: Proxy, bucket: str, target: int
) -> None:
    client, rng = s3_server.client(), random.Random(3)
    blobs = {f"k{number:02d}": rng.randbytes(30_000 + number) for number in range(40)} | {
        "big": rng.randbytes(900_000)
    }
    for key, data in blobs.items():
        client.put_object(Bucket=bucket, Key=key, Body=data)
    source = open_s3(SourceSection("s3://", endpoint=proxy.endpoint))
    extent = extent_of(Piece(version, 0, version.size_bytes) for version in source.list(f"s3://{bucket}/"))
    proxy.reset()
    fetcher = Fetcher(lambda _: source, threads=16, part_bytes=1 << 18)
    fetcher.fetch(extent, target)
    fetcher.close()
    source.close()
    assert os.pread(target, extent.size_bytes + 1, 0) == b"".join(blobs[key] for key in sorted(blobs))
    assert sum(count for each, count in proxy.counts.by.items() if each.startswith("GET")) == 40 + 4
    assert proxy.counts.requests == 40 + 4 + 1  # a HEAD of the object that is read by ranges
    assert proxy.counts.bytes == extent.size_bytes
    assert set(proxy.counts.by.values()) == {1}


def test_bytes_are_seen_once_they_can_be_read_from_the_target(
    tmp_path: Path, fetcher: Fetcher, target: int
) -> None:
    data, seen = random.Random(5).randbytes(300_000), []

    def passing(at: int, part: memoryview) -> None:
        seen.append((at, len(part)))
        assert os.pread(target, len(part), at) == part

    fetcher.fetch(extent_of([Piece(_stored(tmp_path / "object", data), 0, len(data))]), target, passing)
    assert sum(size for _, size in seen) == len(data)
