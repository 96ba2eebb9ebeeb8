"""The conformance suite of every source: S3 (SeaweedFS), a local directory, fsspec's memory file system."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import fsspec
import pytest
from fsspec.spec import AbstractFileSystem

from cachesvc.core.errors import CorruptData, InvalidInput, NotFound, SourceChanged, SourceUnavailable
from cachesvc.core.model import ObjectVersion
from cachesvc.sources.files import FilesSource
from cachesvc.sources.remote import FsspecSource, open_fsspec
from cachesvc.sources.resilient import Resilient
from cachesvc.sources.s3.s3 import open_s3
from cachesvc.sources.source import Source
from cachesvc.sources.watched import CallWatch, WatchedSource
from testbed.servers import SeaweedFS
from tests.support.reads import read

ODD_KEYS = [
    "sp ace/a b.txt",
    "plus+and&=",
    "umlaut-ä€😀",
    "per%20cent",
    "per%cent",
    "d.o.t/..x",
    "q?u#e",
    "~tilde'()!*",
]


@dataclass
class Store:
    """A source under test, and a way to write to its storage."""

    source: Source
    root: str
    put: Callable[[str, bytes], object]


@pytest.fixture(params=["s3", "files", "memory", "resilient-s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    if request.param == "files":

        def put(key: str, data: bytes) -> None:
            (tmp_path / key).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / key).write_bytes(data)

        made = Store(WatchedSource(FilesSource(), CallWatch()), f"file://{tmp_path}/", put)
    elif request.param == "memory":
        root = f"memory://t{uuid.uuid4().hex}/"
        files = fsspec.filesystem("memory")
        made = Store(open_fsspec(root), root, lambda key, data: files.pipe_file(root + key, data))
        files.mkdir(root)
    else:
        request.getfixturevalue("s3_env")
        server: SeaweedFS = request.getfixturevalue("s3_server")
        bucket, client = request.getfixturevalue("bucket"), server.client()
        source: Source = open_s3()
        if request.param == "resilient-s3":
            source = Resilient(source)
        made = Store(
            source, f"s3://{bucket}/", lambda key, data: client.put_object(Bucket=bucket, Key=key, Body=data)
        )
    yield made
    made.source.close()


def test_lists_below_a_prefix_in_key_order_on_segment_borders(store: Store) -> None:
    for key in ("a/2", "a-b/1", "a/1", "ab", "a/1.d/x", "b"):
        store.put(key, key.encode())
    assert [v.uri for v in store.source.list(store.root)] == [
        store.root + key for key in ("a-b/1", "a/1", "a/1.d/x", "a/2", "ab", "b")
    ]
    for prefix in ("a", "a/"):
        found = [v.uri for v in store.source.list(store.root + prefix)]
        assert found == [store.root + key for key in ("a/1", "a/1.d/x", "a/2")]


def test_lists_one_object_where_the_uri_names_it(store: Store) -> None:
    store.put("one", b"1")
    store.put("one.more", b"22")
    assert [(v.uri, v.size_bytes) for v in store.source.list(store.root + "one")] == [(store.root + "one", 1)]


def test_head_and_list_agree_on_the_version(store: Store) -> None:
    store.put("x", b"hello")
    (listed,) = store.source.list(store.root)
    assert listed == store.source.head(store.root + "x")
    assert listed.size_bytes == 5
    assert listed.etag


def test_reads_exactly_the_range(store: Store) -> None:
    data = random.Random(0).randbytes(300_001)
    store.put("x", data)
    version = store.source.head(store.root + "x")
    for offset, size in ((0, 1), (0, 300_001), (1, 300_000), (300_000, 1), (4096, 65536), (7, 0)):
        assert read(store.source, version, offset, size) == data[offset : offset + size]


def test_a_zero_byte_object_is_an_object(store: Store) -> None:
    store.put("empty", b"")
    (version,) = store.source.list(store.root)
    assert version.size_bytes == 0
    assert read(store.source, version) == b""


def test_odd_keys_come_back_as_they_are(store: Store) -> None:
    for key in ODD_KEYS:
        store.put(key, key.encode())
    versions = list(store.source.list(store.root))
    assert [v.uri for v in versions] == sorted((store.root + k for k in ODD_KEYS), key=str.encode)
    for version in versions:
        assert read(store.source, version).decode() == version.uri.removeprefix(store.root)
        assert store.source.head(version.uri) == version


def test_lists_more_than_one_page(store: Store) -> None:
    with ThreadPoolExecutor(16) as threads:
        list(threads.map(lambda number: store.put(f"many/{number:04d}", b"x"), range(1010)))
    found = [v.uri for v in store.source.list(store.root + "many/")]
    assert found == [f"{store.root}many/{number:04d}" for number in range(1010)]


def test_missing_objects_and_roots_are_not_found(store: Store) -> None:
    with pytest.raises(NotFound, match="nowhere"):
        store.source.head(store.root + "nowhere")
    with pytest.raises(NotFound):
        read(store.source, ObjectVersion(store.root + "nowhere", 5, ""), 0, 5)
    missing = "s3://no-such-bucket-here/" if store.root.startswith("s3") else store.root + "no/such/"
    with pytest.raises(NotFound, match=missing.rstrip("/")):
        list(store.source.list(missing))


@pytest.mark.parametrize("after", [b"other", b"longer than before", b"s"])
def test_a_changed_object_is_named_never_read(store: Store, after: bytes) -> None:
    store.put("x", b"first")
    version = store.source.head(store.root + "x")
    store.put("x", after)
    with pytest.raises(SourceChanged, match="x"):
        read(store.source, version)


def test_threads_share_a_source(store: Store) -> None:
    data = random.Random(1).randbytes(1 << 20)
    store.put("x", data)
    version = store.source.head(store.root + "x")
    offsets = [(number * 7919) % (1 << 19) for number in range(64)]
    with ThreadPoolExecutor(16) as threads:
        got = list(threads.map(lambda offset: read(store.source, version, offset, 1 << 19), offsets))
    assert got == [data[offset : offset + (1 << 19)] for offset in offsets]


@pytest.mark.parametrize("name", ["caf\udce9", "lone \ud800"])
def test_a_name_that_is_not_utf_8_is_a_typed_error(name: str) -> None:
    root = f"memory://t{uuid.uuid4().hex}/"
    fsspec.filesystem("memory").pipe_file(root + name, b"data")
    with pytest.raises(InvalidInput, match=r"not UTF-8: .*\\ud.*; rename it"):
        list(open_fsspec(root).list(root))


class _Trouble(Exception):
    """An exception that is no OSError, like gcsfs's HttpError, Azure's and paramiko's."""


class _Down(AbstractFileSystem):
    """A driver whose storage fails."""

    def find(self, *_: object, **__: object) -> None:
        raise _Trouble("503 try again")

    info = cat_file = find


def test_any_exception_of_a_driver_is_a_transient_error() -> None:
    source = FsspecSource(_Down())
    version = ObjectVersion("down://host/x", 5, "")
    calls: list[Callable[[], object]] = [
        lambda: list(source.list("down://host/")),
        lambda: source.head(version.uri),
        lambda: read(source, version),
    ]
    for call in calls:
        with pytest.raises(SourceUnavailable, match=r"down://host/.*: 503 try again"):
            call()


class _Store(AbstractFileSystem):
    """A driver with a file of five bytes and its own key for the version."""

    def __init__(self, word: str) -> None:
        super().__init__()
        self.word, self.version, self.data = word, 1, b"first"

    def info(self, path: str, **_: object) -> dict[str, object]:
        return {"name": path, "size": 5, "type": "file", self.word: self.version}

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: object) -> bytes:
        return self.data[start:end]


@pytest.mark.parametrize("word", ["ETag", "mtime", "modificationTime", "blob_id"])
def test_each_drivers_version_key_is_read(word: str) -> None:
    files = _Store(word)
    source = FsspecSource(files)
    version = source.head("store://host/x")
    files.version, files.data = 2, b"later"
    with pytest.raises(SourceChanged, match="no longer the version"):
        read(source, version)


def test_a_drivers_differently_written_tag_is_the_same_version() -> None:
    files = _Store("etag")
    files.version = 'W/"abc"'  # type: ignore[assignment]
    source = FsspecSource(files)
    version = source.head("store://host/x")
    files.version = '"abc"'  # type: ignore[assignment]
    assert read(source, version) == b"first"


def test_a_driver_that_always_returns_other_lengths_is_corrupt_data() -> None:
    files = _Store("e_tag")
    source = Resilient(FsspecSource(files), sleep=lambda _: None)
    version = source.head("store://host/x")
    files.data = b"decoded, and longer"
    files.cat_file = lambda *_, **__: files.data  # type: ignore[method-assign]
    with pytest.raises(CorruptData, match="gave 19 bytes of the 5 asked for, twice"):
        read(source, version)
    assert source.counters.requests == 2
