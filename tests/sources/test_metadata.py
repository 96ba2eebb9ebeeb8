"""Cached listings: requested once, dropped on request, never unpickled."""

from __future__ import annotations

import os
import pickle
import shutil
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

from cachesvc.core.errors import CacheError, CorruptData, NotFound, SourceChanged
from cachesvc.core.model import ObjectVersion
from cachesvc.sources.metadata import CachedMetadata
from cachesvc.sources.open import Sources, SourceSettings
from cachesvc.sources.source import OnReceived, ignore_received
from testbed.servers import SeaweedFS
from tests.support.reads import FakeSource, read


class CountingSource(FakeSource):
    """A source that lists three objects below any prefix and counts its calls."""

    def __init__(self) -> None:
        self.asked = 0
        self.error: CacheError | None = None

    def list(self, prefix: str) -> Iterator[ObjectVersion]:
        self.asked += 1
        yield from (ObjectVersion(f"{prefix}{name}", 1, "e") for name in ("ä", "b", "c"))

    def head(self, uri: str) -> ObjectVersion:
        self.asked += 1
        if uri.endswith("missing"):
            raise NotFound(uri)
        return ObjectVersion(uri, 1, "e")

    def read_into(
        self, version: ObjectVersion, offset: int, into: memoryview, received: OnReceived = ignore_received
    ) -> None:
        if self.error is not None:
            raise self.error
        into[:] = b"x" * len(into)

    def checker(self, version: ObjectVersion) -> None:
        if self.error is not None:
            raise self.error


class Bomb:
    """An object that leaves a file when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return (open, ("exploded", "w"))


@pytest.fixture
def source() -> CountingSource:
    return CountingSource()


@pytest.fixture
def cached(source: CountingSource, tmp_path: Path) -> Iterator[CachedMetadata]:
    found = CachedMetadata(source, tmp_path / "meta")
    yield found
    found.close()


def test_a_listing_and_a_head_are_requested_once(source: CountingSource, cached: CachedMetadata) -> None:
    assert list(cached.list("s3://b/p/")) == list(cached.list("s3://b/p/"))
    assert cached.head("s3://b/x") == cached.head("s3://b/x")
    assert source.asked == 2


def test_an_incomplete_listing_and_a_missing_object_are_not_cached(
    source: CountingSource, cached: CachedMetadata
) -> None:
    next(cached.list("s3://b/p/"))
    assert len(list(cached.list("s3://b/p/"))) == 3
    for _ in range(2):
        with pytest.raises(NotFound):
            cached.head("s3://b/missing")
    assert source.asked == 4


def test_forget_drops_its_bucket_only(source: CountingSource, cached: CachedMetadata) -> None:
    for prefix in ("s3://b/p/", "s3://b/q/", "s3://other/p/"):
        list(cached.list(prefix))
    assert cached.forget("s3://b/p/") == 2
    list(cached.list("s3://other/p/"))
    list(cached.list("s3://b/p/"))
    assert source.asked == 4


@pytest.mark.parametrize("kind", [SourceChanged, NotFound])
@pytest.mark.parametrize("call", [read, CachedMetadata.checker])
def test_a_change_found_by_a_read_or_a_checker_drops_the_listing(
    source: CountingSource, cached: CachedMetadata, call: Callable[..., object], kind: type[CacheError]
) -> None:
    (version, *_) = cached.list("s3://b/p/")
    source.error = kind("not what was listed")
    with pytest.raises(kind):
        call(cached, version)
    list(cached.list("s3://b/p/"))
    assert source.asked == 2


def test_endpoints_do_not_share_listings(source: CountingSource, tmp_path: Path) -> None:
    for asked, endpoint in ((2, "http://a"), (4, "http://b"), (4, "http://a")):
        cached = CachedMetadata(source, tmp_path / "meta", endpoint=endpoint)
        list(cached.list("s3://b/p/"))
        cached.head("s3://b/x")
        cached.close()
        assert source.asked == asked


def test_another_endpoint_is_listed_for_itself(
    s3_server: SeaweedFS, s3_env: dict[str, str], bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One server has two names: the second must not get the cached listing of the first."""
    settings = SourceSettings(metadata_directory=tmp_path / "meta")
    for count in (1, 2):
        s3_server.client().put_object(Bucket=bucket, Key=f"p/{count}", Body=b"x")
        listed = [
            len(list(Sources(settings)(f"s3://{bucket}/p/").list(f"s3://{bucket}/p/"))) for _ in range(2)
        ]
        assert listed == [count, count]
        monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server.endpoint.replace("127.0.0.1", "localhost"))


def test_an_expired_listing_is_requested_again(source: CountingSource, tmp_path: Path) -> None:
    cached = CachedMetadata(source, tmp_path / "meta", expiry_s=-1.0)
    list(cached.list("s3://b/p/"))
    list(cached.list("s3://b/p/"))
    cached.close()
    assert source.asked == 2


def test_a_row_from_before_the_clock_was_set_back_is_not_used(source: CountingSource, tmp_path: Path) -> None:
    """The row is written by diskcache's clock and read an hour earlier."""
    cached = CachedMetadata(source, tmp_path / "meta", clock=lambda: time.time() - 3600)
    list(cached.list("s3://b/p/"))
    list(cached.list("s3://b/p/"))
    cached.close()
    assert source.asked == 2


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 1 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1M", "none", folder]).returncode:
        pytest.skip("mounting takes root")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.parametrize("from_the_start", [True, False])
def test_with_a_full_disk_listings_still_work(
    source: CountingSource, small_disk: Path, from_the_start: bool
) -> None:
    cached = CachedMetadata(source, small_disk / "meta")
    if not from_the_start:
        list(cached.list("s3://b/p/"))
    others = small_disk / "others"
    with suppress(OSError), open(others, "wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    asked = source.asked
    for _ in range(2):
        assert len(list(cached.list("s3://b/q/"))) == 3
        cached.head("s3://b/x")
    assert source.asked == asked + 4
    others.unlink()
    for _ in range(2):
        list(cached.list("s3://b/q/"))
    assert source.asked == asked + 5, "it keeps again"
    cached.close()


def test_without_the_directory_the_source_is_requested(source: CountingSource, tmp_path: Path) -> None:
    cached = CachedMetadata(source, tmp_path / "meta")
    list(cached.list("s3://b/p/"))
    shutil.rmtree(tmp_path / "meta")
    for _ in range(4):
        assert len(list(cached.list("s3://b/q/"))) == 3
    cached.close()
    CachedMetadata(source, tmp_path / "meta").forget("s3://b/")
    assert (tmp_path / "meta").stat().st_mode & 0o077 == 0, "the listings name the data of all users"


def damaged(file: Path, how: str, random: Random) -> None:
    """Damage a database as a loss of power or a bad sector does."""
    data = bytearray(file.read_bytes())
    start = random.randrange(100, len(data))
    if how == "behind the header":
        data[100:] = random.randbytes(len(data) - 100)
    elif how == "garbage":
        data[:] = b"garbage" * 1000
    elif how == "cut":
        del data[start:]
    elif how == "a page of zeros":
        data[start & ~4095 : (start & ~4095) + 4096] = bytes(4096)
    else:
        for place in random.choices(range(100, len(data)), k=50):
            data[place] ^= 1 << random.randrange(8)
    file.write_bytes(data)


@pytest.mark.parametrize("how", ["garbage", "behind the header", "cut", "a page of zeros", "flipped bits"])
@pytest.mark.parametrize("seed", range(4))
def test_a_damaged_database_is_replaced(source: CountingSource, tmp_path: Path, how: str, seed: int) -> None:
    def listed(cached: CachedMetadata) -> int:
        """Count the calls of the source for all listings."""
        before = source.asked
        for number in range(20):
            assert len(list(cached.list(f"s3://b{number % 3}/{number}/"))) == 3
        return source.asked - before

    cached = CachedMetadata(source, tmp_path / "meta")
    listed(cached)
    cached.close()
    damaged(tmp_path / "meta/cache.db", how, Random(seed))
    cached = CachedMetadata(source, tmp_path / "meta")
    for number in range(3):
        cached.forget(f"s3://b{number}/")
    assert listed(cached) == 20
    listed(cached)
    assert listed(cached) == 0, "it keeps again"
    cached.close()


def test_a_database_that_another_process_locks_delays_little_and_old_rows_are_not_used(
    source: CountingSource, tmp_path: Path
) -> None:
    cached = CachedMetadata(source, tmp_path / "meta")
    list(cached.list("s3://b/p/"))
    rows = sqlite3.connect(tmp_path / "meta/cache.db", isolation_level=None)
    rows.execute("BEGIN EXCLUSIVE")
    assert cached.forget("s3://b/p/") == 0
    rows.close()
    list(cached.list("s3://b/p/"))
    list(cached.list("s3://b/p/"))
    assert source.asked == 3, "rows that were not dropped may be old"
    cached.close()


def test_a_database_that_is_locked_when_it_is_opened_is_not_waited_for(
    source: CountingSource, tmp_path: Path
) -> None:
    CachedMetadata(source, tmp_path / "meta").forget("s3://b/")
    rows = sqlite3.connect(tmp_path / "meta/cache.db", isolation_level=None)
    rows.execute("BEGIN EXCLUSIVE")
    cached = CachedMetadata(source, tmp_path / "meta")
    for _ in range(20):  # not two seconds each
        assert len(list(cached.list("s3://b/q/"))) == 3
    assert source.asked == 20
    cached.close()
    rows.close()


@pytest.mark.parametrize(
    ("change", "value"),
    [
        ("value = ?, mode = 4", pickle.dumps(Bomb())),
        ("filename = ?, mode = 4, value = NULL", "../../bomb"),
        ("filename = ?, mode = 3, value = NULL", "../../bomb"),
        ("value = ?, mode = 1", "[1, 2"),
        ("value = ?, mode = 1", '{"a": 1}'),
        ("value = ?, mode = 1", "[[1, 2, 3]]"),
        ("value = ?, mode = 1", 17),
    ],
)
def test_a_tampered_row_is_replaced_and_not_unpickled(
    source: CountingSource,
    cached: CachedMetadata,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: str,
    value: object,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bomb").write_bytes(pickle.dumps(Bomb()))
    list(cached.list("s3://b/p/"))
    with sqlite3.connect(tmp_path / "meta" / "cache.db") as rows:
        rows.execute(f"UPDATE Cache SET {change}", (value,))
    for _ in range(2):
        assert len(list(cached.list("s3://b/p/"))) == 3
    assert source.asked == 2, "the second one is kept again"
    assert not (tmp_path / "exploded").exists()


def test_a_tampered_key_is_refused_not_unpickled(
    cached: CachedMetadata, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    list(cached.list("s3://b/p/"))
    with sqlite3.connect(tmp_path / "meta" / "cache.db") as rows:
        rows.execute("UPDATE Cache SET key = ?, raw = 0", (pickle.dumps(Bomb()),))
    with pytest.raises(CorruptData):
        list(cached._cache())
    assert not (tmp_path / "exploded").exists()
