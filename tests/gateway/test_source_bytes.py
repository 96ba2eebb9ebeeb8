"""The bytes that the gateway fetches from the source for reads by name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from cachesvc.gateway.filesystem import CachedFileSystem
from testbed.node import Daemon, open_files
from tests.support.faults.fake_s3 import FakeS3, Object, fake_s3
from tests.support.waiting import wait_until

COUNT, SIZE = 250, 30_000
TOTAL = COUNT * SIZE


@dataclass
class Bucket:
    """A bucket of `COUNT` small files and a large one, and a daemon whose cache holds 70 % of the small ones."""

    server: FakeS3
    daemon: Daemon


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucket]:
    with fake_s3() as server:
        for n in range(COUNT):
            server.objects[f"d/{n:04d}.bin"] = Object(SIZE, f"{n:031x}-7", bytes([n % 251]) * SIZE)
        server.objects["large/x.bin"] = Object(40 << 20)
        keys = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s", "AWS_ENDPOINT_URL": server.endpoint}
        options = ["--ram", str(TOTAL * 7 // 10), "--extent-bytes", "1MiB"]
        with Daemon(tmp_path_factory.mktemp("node"), options, keys) as daemon:
            yield Bucket(server, daemon)


@pytest.fixture
def bucket(shared: Bucket, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    for name, value in {**shared.daemon.env, "CACHESVC": "require"}.items():
        monkeypatch.setenv(name, value)
    shared.server.sent_bytes = 0
    return shared


@pytest.mark.slow
def test_after_a_listing_a_read_fetches_its_file_alone(bucket: Bucket, fs: CachedFileSystem) -> None:
    assert len(fs.ls("s3/bkt/d")) == COUNT
    assert fs.cat_file("s3/bkt/d/0207.bin") == bytes([207]) * SIZE
    assert bucket.server.sent_bytes == SIZE


@pytest.mark.slow
def test_files_in_the_order_of_their_names_are_fetched_about_once_each_time(
    bucket: Bucket, fs: CachedFileSystem
) -> None:
    for epoch in range(2):
        for n, name in enumerate(sorted(fs.ls("s3/bkt/d", detail=False))):
            assert fs.cat_file(name, 0, 1000) == bytes([n % 251]) * 1000
        assert bucket.server.sent_bytes < 1.2 * TOTAL * (epoch + 1)


def test_a_part_of_a_large_file_fetches_that_part(bucket: Bucket, fs: CachedFileSystem) -> None:
    fs.cat_file("s3/bkt/large/x.bin", -1000)
    assert bucket.server.sent_bytes == 1 << 20


@pytest.mark.slow
def test_files_opened_by_name_are_closed_when_they_are_unused(bucket: Bucket, fs: CachedFileSystem) -> None:
    assert bucket.daemon.process is not None
    pid = bucket.daemon.process.pid
    for n in range(120):
        fs.cat_file(f"s3/bkt/d/{n:04d}.bin")
    fs.invalidate_cache()
    wait_until(lambda: sum("lmdb" in name or "memfd" in name for name in open_files(pid)) < 60)
    before = bucket.server.sent_bytes
    assert fs.cat_file("s3/bkt/d/0110.bin") == bytes([110]) * SIZE
    assert bucket.server.sent_bytes == before, "what was read stays cached"
