"""Keys of a bucket that no folder of a file system could hold: each object is seen once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cachesvc.core.errors import InvalidInput, NotFound
from cachesvc.gateway.filesystem import CachedFileSystem
from testbed.node import Daemon
from tests.support.faults.fake_s3 import Object, fake_s3

KEYS = (
    "a/x.bin", "a//x.bin", "a///x.bin", "a/s/u.bin", "a/s//t/z.bin", "a/b", "a/b/c", "a/b/c/d", "a/b//e",
    "a/back\\slash", "a/tab\there", "a/[1]/{2}", "a", "ab", "b/plain/1", "b/plain/2",
)  # fmt: skip


def body(key: str) -> bytes:
    return f"bytes of {key}".encode()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of a bucket, and of a daemon that reads it."""
    with fake_s3() as server:
        for key in KEYS:
            server.objects[key] = Object(len(body(key)), f"{hash(key):032x}", body(key))
        keys = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s", "AWS_ENDPOINT_URL": server.endpoint}
        with Daemon(tmp_path_factory.mktemp("node"), ["--ram", "64MiB"], keys) as daemon:
            yield {**keys, **daemon.env}


@pytest.fixture(params=["off", "require"], autouse=True)
def _way(request: pytest.FixtureRequest, served: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Read the bucket directly, or through the daemon alone."""
    for name, value in {**served, "CACHESVC": request.param}.items():
        monkeypatch.setenv(name, value)


def below(folder: str) -> set[str]:
    return {f"s3/bkt/{key}" for key in KEYS if key.startswith(f"{folder}/" if folder else "")}


@pytest.mark.parametrize("folder", ["", "a", "a/b", "a/s", "b"])
def test_every_object_is_found_once_and_read(fs: CachedFileSystem, folder: str) -> None:
    path = f"s3/bkt/{folder}".rstrip("/")
    names = fs.find(path)
    assert sorted(below(folder)) == names
    walked = [f"{at}/{name}" for at, _, files in fs.walk(path) for name in files]
    assert sorted(walked) == names
    assert fs.du(path) == sum(len(body(name.removeprefix("s3/bkt/"))) for name in names)
    for name in names:
        assert fs.cat_file(name) == body(name.removeprefix("s3/bkt/"))


def test_an_object_and_the_folder_of_its_name_are_two_entries(fs: CachedFileSystem) -> None:
    found = [(entry["name"], entry["type"]) for entry in fs.ls("s3/bkt/a")]
    assert found.count(("s3/bkt/a/b", "file")) == found.count(("s3/bkt/a/b", "directory")) == 1
    assert ("s3/bkt/a//x.bin", "file") in found
    assert fs.info("s3/bkt/a/b")["type"] == "file"


@pytest.mark.parametrize("key", KEYS)
def test_every_object_is_read_by_its_name(fs: CachedFileSystem, key: str) -> None:
    assert fs.cat_file(f"s3/bkt/{key}") == body(key)
    assert fs.info(f"s3/bkt/{key}")["size"] == len(body(key))


def test_an_object_that_was_read_hides_no_folder_of_its_name(fs: CachedFileSystem) -> None:
    assert fs.cat_file("s3/bkt/a/b") == body("a/b")
    assert fs.cat_file("s3/bkt/a/b/c") == body("a/b/c")
    with pytest.raises(NotFound):
        fs.info("s3/bkt/a//b")


def test_a_walk_from_below_and_one_of_some_depth(fs: CachedFileSystem) -> None:
    down = [(at, sorted(folders), sorted(files)) for at, folders, files in fs.walk("s3/bkt/a/s")]
    up = [(at, sorted(folders), sorted(files)) for at, folders, files in fs.walk("s3/bkt/a/s", topdown=False)]
    assert down == up[::-1] == [("s3/bkt/a/s", ["/t"], ["u.bin"]), ("s3/bkt/a/s//t", [], ["z.bin"])]
    assert [at for at, _, _ in fs.walk("s3/bkt/a", maxdepth=1)] == ["s3/bkt/a"]
    pruned = []
    for at, folders, _ in fs.walk("s3/bkt/a"):
        pruned.append(at)
        folders.clear()
    assert pruned == ["s3/bkt/a"]
    missing: list[OSError] = []
    assert not list(fs.walk("s3/bkt/none", on_error=missing.append))
    assert isinstance(missing[0], NotFound)


def test_copies_of_a_folder_are_whole_or_named(fs: CachedFileSystem, tmp_path: Path) -> None:
    fs.get("s3/bkt/b", str(tmp_path / "b"), recursive=True)
    assert [(tmp_path / "b/plain" / name).read_bytes() for name in "12"] == [
        body("b/plain/1"),
        body("b/plain/2"),
    ]
    fs.get("s3/bkt/a/s", str(tmp_path / "s"), recursive=True)
    assert (tmp_path / "s/t/z.bin").read_bytes() == body("a/s//t/z.bin")
    with pytest.raises(InvalidInput, match=r"a///x.bin.*one local file"):
        fs.get("s3/bkt/a", str(tmp_path / "a"), recursive=True)
    with pytest.raises(InvalidInput, match=r"a/b/c .*the folder of"):
        fs.get("s3/bkt/a/b", str(tmp_path / "c"), recursive=True)
