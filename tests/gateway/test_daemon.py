"""The daemon's decisions hold for files, too: policy, allowlist, leases, one fetch, restarts."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import fsspec
import pytest

from cachesvc.catalog.options import Options
from cachesvc.client.control import Control
from cachesvc.client.grants import DaemonGrants
from cachesvc.client.protocol import Granted
from cachesvc.core.errors import DaemonUnavailable, NotAllowed, SourceChanged
from cachesvc.core.model import DatasetId
from cachesvc.gateway.filesystem import CachedFileSystem
from cachesvc.gateway.leased_reads import IDLE_POLLS
from testbed import WAIT_S
from testbed.node import Daemon
from testbed.servers import SeaweedFS
from tests.support.shared_daemon import for_one_test
from tests.support.waiting import wait_until

EXTENT_BYTES = 64 << 10
RECORD_BYTES = 12 << 10
"""Extents of such records have other bounds than those of a file."""


@dataclass
class Folder:
    """A folder of one test, in a bucket whose prefix `data/` the daemon serves."""

    server: SeaweedFS
    bucket: str
    name: str = field(default_factory=lambda: uuid.uuid4().hex[:8])

    @property
    def path(self) -> str:
        """The path in the file system."""
        return f"s3/{self.bucket}/data/{self.name}"

    def put(self, name: str, body: bytes) -> bytes:
        """Write an object and return its bytes."""
        self.server.client().put_object(Bucket=self.bucket, Key=f"data/{self.name}/{name}", Body=body)
        return body


@pytest.fixture(scope="module")
def shared(s3_server: SeaweedFS, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Daemon, str]]:
    """A daemon that alone has the credentials of a bucket."""
    bucket = s3_server.create_bucket(f"b-{uuid.uuid4().hex[:12]}")
    options = ["--ram", "4MiB", "--extent-bytes", str(EXTENT_BYTES), "--allow", f"s3://{bucket}/data/"]
    with Daemon(tmp_path_factory.mktemp("node"), options, s3_server.env()) as daemon:
        yield daemon, bucket


@pytest.fixture
def node(
    shared: tuple[Daemon, str], s3_server: SeaweedFS, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Daemon]:
    """The daemon, for a process that knows the server and has no credentials."""
    for name, value in s3_server.env().items():
        if "KEY" not in name:
            monkeypatch.setenv(name, value)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, os.devnull)
    monkeypatch.setenv("CACHESVC", "auto")
    monkeypatch.setenv("CACHESVC_SOCKET", shared[0].socket_dir)
    lent = for_one_test(shared[0])
    yield next(lent)
    CachedFileSystem.clear_instance_cache()
    next(lent, None)


@pytest.fixture
def folder(shared: tuple[Daemon, str], s3_server: SeaweedFS) -> Folder:
    return Folder(s3_server, shared[1])


def test_several_readers_fetch_an_object_once(node: Daemon, folder: Folder) -> None:
    body = folder.put("big.bin", bytes(range(256)) * 2000)
    before = source_bytes()
    for _ in range(3):
        again = CachedFileSystem(skip_instance_cache=True)
        assert again.cat_file(f"{folder.path}/big.bin") == body
        with fsspec.open(f"cachesvc://{folder.path}/big.bin") as file:
            assert file.read() == body
    wait_until(lambda: source_bytes() - before >= len(body))
    assert source_bytes() - before == len(body)


def test_what_an_open_dataset_has_comes_from_its_extents(node: Daemon, folder: Folder) -> None:
    body, other = (
        folder.put("a.bin", os.urandom(RECORD_BYTES * 10)),
        folder.put("z", os.urandom(RECORD_BYTES)),
    )
    fs, name = CachedFileSystem(skip_instance_cache=True), f"{folder.path}/a.bin"
    with Control() as control:
        options = Options(format="records", record_bytes=RECORD_BYTES)
        opened = control.open_dataset([f"s3://{folder.bucket}/data/{folder.name}/a.bin"], options)
    before, grants = source_bytes(), DaemonGrants(node.socket_dir, opened.id)
    for answer in grants.acquire(range(opened.dataset.extents), WAIT_S):
        assert isinstance(answer, Granted)
        os.close(answer.fd)
    assert fs.cat_file(name) == body
    with fs.open(name) as file:
        assert (file.seek(RECORD_BYTES - 3), file.read(9)) == (RECORD_BYTES - 3, body[RECORD_BYTES - 3 :][:9])
        assert fs.cat_file(f"{folder.path}/z") == other  # no dataset in use has it
        wait_until(lambda: source_bytes() == before + len(body) + len(other))
        grants.close()
        with Control() as control:
            wait_until(lambda: not control.evict(opened.id).busy_bytes)
        assert (file.seek(0), file.read()) == (0, body), "its job has ended, and its extents are gone"
    body = folder.put("a.bin", os.urandom(RECORD_BYTES * 10))
    fs.invalidate_cache()
    assert fs.cat_file(name) == body


def source_bytes() -> int:
    with Control() as control:
        return int(control.status().sources.bytes)


def opened() -> list[tuple[int, int]]:
    """The extents and files of the datasets that are below the folder of a test."""
    with Control() as control:
        return [(each.dataset.extents, each.dataset.samples) for each in control.list() if each.readers]


@pytest.mark.slow
def test_each_file_of_a_listed_folder_has_an_extent_of_its_own(
    node: Daemon, folder: Folder, fs: CachedFileSystem
) -> None:
    bodies = {f"{folder.path}/{n:02d}.txt": folder.put(f"{n:02d}.txt", bytes([n]) * 500) for n in range(40)}
    assert fs.cat(fs.glob(f"cachesvc://{folder.path}/*.txt")) == bodies
    assert opened() == [(40, 40)]


def test_small_files_of_a_folder_that_is_named_share_extents(node: Daemon, folder: Folder) -> None:
    bodies = [folder.put(f"store/{n}", bytes([n]) * 10) for n in range(3)]
    store = CachedFileSystem(folder=f"cachesvc://{folder.path}/store", skip_instance_cache=True)
    assert [store.cat_file(f"{folder.path}/store/{n}") for n in range(3)] == bodies
    assert opened() == [(1, 3)]


def test_the_allowlist_of_the_daemon_applies(
    node: Daemon, folder: Folder, s3_server: SeaweedFS, fs: CachedFileSystem
) -> None:
    s3_server.client().put_object(Bucket=folder.bucket, Key="secret/x", Body=b"x")
    with pytest.raises(NotAllowed, match="not below an allowed prefix"):
        fs.cat_file(f"s3/{folder.bucket}/secret/x")


def test_an_open_file_keeps_its_version_and_the_next_one_has_the_new(
    node: Daemon, folder: Folder, fs: CachedFileSystem, s3_env: dict[str, str]
) -> None:
    folder.put("x.bin", b"a" * 150_000)
    file = fs.open(f"{folder.path}/x.bin")
    assert file.read(70_000) == b"a" * 70_000, "two extents of three"
    folder.put("x.bin", b"b" * 150_000)
    assert file.read(60_000) == b"a" * 60_000
    file.seek(140_000)
    with pytest.raises(SourceChanged):
        file.read(10)
    fs.invalidate_cache()
    assert fs.cat_file(f"{folder.path}/x.bin") == b"b" * 150_000


def test_leases_end_with_the_reading(node: Daemon, folder: Folder, fs: CachedFileSystem) -> None:
    folder.put("x.bin", b"a" * 150_000)
    file = fs.open(f"{folder.path}/x.bin")
    assert len(file.read()) == 150_000

    def evicted() -> bool:
        with Control() as control:
            [dataset] = [each.dataset for each in control.list() if each.readers]
            return not control.evict(DatasetId(dataset.id)).busy_bytes

    wait_until(evicted)
    file.seek(0)
    assert len(file.read()) == 150_000, "and begin again with the next read"


def test_an_idle_file_leaves_the_daemon_and_comes_back(
    node: Daemon, folder: Folder, fs: CachedFileSystem
) -> None:
    body = folder.put("x.bin", b"a" * 150_000)
    file = fs.open(f"{folder.path}/x.bin")
    assert file.read() == body
    assert opened()
    snapshot, _ = fs.file(f"{folder.path}/x.bin")
    assert snapshot.leased is not None
    for _ in range(IDLE_POLLS + 2):  # the first ones release its extents
        snapshot.leased.poll()
    wait_until(lambda: not opened())
    file.seek(0)
    assert file.read() == body
    assert opened()


@pytest.mark.slow
def test_without_credentials_a_read_waits_for_the_daemon(
    node: Daemon, folder: Folder, fs: CachedFileSystem
) -> None:
    body = folder.put("x.bin", b"a" * 150_000)
    file = fs.open(f"{folder.path}/x.bin")
    node.kill()
    found: list[bytes] = []
    reading = threading.Thread(target=lambda: found.append(file.read()))
    reading.start()
    leased = fs.file(f"{folder.path}/x.bin")[0].leased
    assert leased is not None
    wait_until(lambda: leased._reading)
    for _ in range(IDLE_POLLS + 2):  # a connection that a read waits for is not idle
        leased.poll()
    node.start()
    reading.join(60)
    assert found == [body]


def test_with_credentials_a_read_goes_on_without_the_daemon(
    node: Daemon, folder: Folder, fs: CachedFileSystem, s3_env: dict[str, str]
) -> None:
    body = folder.put("x.bin", b"a" * 150_000)
    file = fs.open(f"{folder.path}/x.bin")
    node.kill()
    assert file.read() == body


@pytest.mark.slow
def test_a_file_may_be_larger_than_the_cache(node: Daemon, folder: Folder, fs: CachedFileSystem) -> None:
    body = folder.put("large.bin", bytes(range(256)) * (6 << 12))
    with fs.open(f"{folder.path}/large.bin") as file:
        assert all(file.read(1 << 20) == body[at : at + (1 << 20)] for at in range(0, len(body), 1 << 20))


def test_a_required_daemon_is_named_where_none_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fs: CachedFileSystem
) -> None:
    monkeypatch.setenv("CACHESVC", "require")
    monkeypatch.setenv("CACHESVC_SOCKET", str(tmp_path))
    monkeypatch.setattr("cachesvc.client.opening.REQUIRE_S", 0.0)
    with pytest.raises(DaemonUnavailable, match="cachesvc serve"):
        fs.info(f"file{tmp_path}/x")


def test_a_bucket_is_read_without_a_daemon(
    s3_server: SeaweedFS,
    bucket: str,
    s3_env: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    fs: CachedFileSystem,
) -> None:
    monkeypatch.setenv("CACHESVC", "off")
    folder = Folder(s3_server, bucket)
    body = folder.put("x.bin", bytes(range(256)) * 1000)
    assert fs.cat_file(f"{folder.path}/x.bin", 100_000, 100_300) == body[100_000:100_300]
    assert fs.ls(folder.path, detail=False) == [f"{folder.path}/x.bin"]
    file = fs.open(f"{folder.path}/x.bin")
    folder.put("x.bin", b"another")
    with pytest.raises(SourceChanged):
        file.read()
