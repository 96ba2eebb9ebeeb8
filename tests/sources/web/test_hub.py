"""Datasets of a stand-in for Hugging Face's hub: commits, signed URLs that expire, and checksums. The hub itself was not
reached by any test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import cachesvc
from cachesvc.__main__ import run
from cachesvc.core.errors import (
    CacheError,
    CorruptData,
    InvalidInput,
    NotAllowed,
    NotFound,
    SourceChanged,
    SourceUnavailable,
)
from cachesvc.core.model import ObjectVersion
from cachesvc.sources.resilient import Resilience, Resilient
from cachesvc.sources.web.hub import HubSource, open_hub
from loader import DataLoader, open_dataset
from testbed.node import Daemon
from tests.support.clock import Clock
from tests.support.datasets import tar_bytes
from tests.support.faults.web_server import Hub, serving
from tests.support.reads import read

BIG = os.urandom(200_000)
FILES = {"README.md": b"# x", "data/a b.bin": BIG, "data/ü.txt": b"small", "data/deep/z.bin": b"z" * 9}
ROOT = "hf://datasets/owner/name"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    made = Hub(dict(FILES), lfs=frozenset({"data/a b.bin", "data/deep/z.bin"}))
    for name in ("HF_TOKEN", "HF_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    with serving(made):
        monkeypatch.setenv("HF_ENDPOINT", made.url)
        yield made


@pytest.fixture
def source(hub: Hub) -> Iterator[HubSource]:
    made = open_hub()
    yield made
    made.close()


def paths(source: HubSource, uri: str) -> list[str]:
    return [version.uri.removeprefix("hf://datasets/owner/name") for version in source.list(uri)]


def test_a_revision_is_listed_in_pages_at_its_commit(hub: Hub, source: HubSource) -> None:
    assert paths(source, ROOT) == [f"/{path}" for path in sorted(FILES, key=str.encode)]
    assert paths(source, f"{ROOT}@main/data/") == [
        "@main/data/a b.bin",
        "@main/data/deep/z.bin",
        "@main/data/ü.txt",
    ]
    assert paths(source, f"{ROOT}@{hub.sha}/data/deep") == [f"@{hub.sha}/data/deep/z.bin"]
    (version,) = source.list(f"{ROOT}/data/a b.bin")
    assert (version.size_bytes, version.etag) == (len(BIG), f"{hub.sha}-{hub.oid('data/a b.bin')}")
    assert source.head(f"{ROOT}/README.md").size_bytes == 3
    for absent in (f"{ROOT}/data/absent", f"{ROOT}@other/data", "hf://datasets/owner/other/"):
        with pytest.raises(NotFound):
            list(source.list(absent))
    for wrong in ("hf://owner/name/x", "hf://datasets/name", "hf://spaces/owner/name/"):
        with pytest.raises(InvalidInput, match="hf://datasets/OWNER/NAME"):
            list(source.list(wrong))


def test_reads_use_a_signed_url_until_it_expires(hub: Hub, source: HubSource) -> None:
    version = source.head(f"{ROOT}/data/a b.bin")
    hub.seen.clear()
    hub.uses = 3
    for at in range(7):
        assert read(source, version, at * 1000, 500) == BIG[at * 1000 :][:500]
    resolved = [path for path, _ in hub.seen if "/resolve/" in path]
    assert len(resolved) == 3, "one for each ticket of three reads"
    assert all(f"/resolve/{hub.sha}/data/a%20b.bin" in path for path in resolved)
    assert read(source, source.head(f"{ROOT}/data/ü.txt")) == b"small"
    hub.uses = 0
    source.close()
    with pytest.raises(NotAllowed, match="refuses access"):
        read(open_hub(), version)


def test_the_token_goes_to_the_hub_alone(hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hub.token = "hf_secret"
    with pytest.raises(NotAllowed, match="set HF_TOKEN") as caught:
        list(open_hub().list(ROOT))
    assert "hf_secret" not in str(caught.value)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/token").write_text("hf_secret\n")
    source = open_hub()
    assert read(source, source.head(f"{ROOT}/data/a b.bin")) == BIG
    assert any(path.startswith("/cdn/") for path, _ in hub.seen)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert read(open_hub(), source.head(f"{ROOT}/data/ü.txt")) == b"small"


def test_an_object_that_is_read_whole_is_compared_with_its_sha256(hub: Hub, source: HubSource) -> None:
    version = source.head(f"{ROOT}/data/a b.bin")
    hub.corrupt = True
    with pytest.raises(SourceUnavailable, match="arrived damaged"):
        read(source, version)
    with pytest.raises(CorruptData, match="does not match its SHA-256"):
        read(source, version)
    check = source.checker(version)
    assert check is not None
    check([memoryview(BIG[:1000]), memoryview(BIG[1000:])])
    assert source.checker(source.head(f"{ROOT}/data/ü.txt")) is None


def test_an_object_that_is_kept_encoded_is_an_error_that_says_so(hub: Hub, source: HubSource) -> None:
    version = source.head(f"{ROOT}/data/a b.bin")
    hub.encoding = "gzip"
    with pytest.raises(CorruptData, match="Content-Encoding: gzip"):
        read(source, version, 0, 100)


def test_another_object_at_the_commit_is_an_error(hub: Hub, source: HubSource) -> None:
    version = source.head(f"{ROOT}/data/deep/z.bin")
    forged = ObjectVersion(version.uri, 9, f"{hub.sha}-{'0' * 64}")
    with pytest.raises(SourceChanged, match="on the hub"):
        read(source, forged)
    with pytest.raises(CacheError):
        read(source, ObjectVersion(version.uri, 9, f"{'b' * 40}-{hub.oid('data/deep/z.bin')}"))


@pytest.mark.parametrize("status", [500, 502, 429, 200])
def test_a_failing_hub_is_asked_again(hub: Hub, source: HubSource, status: int) -> None:
    patient = Resilient(source, Resilience(), clock := Clock(), sleep=clock.sleep)
    hub.refuse = [status] * 20  # more than a minute of tries
    assert len(list(patient.list(ROOT))) == 4
    hub.refuse = [status]
    assert read(patient, patient.head(f"{ROOT}/data/a b.bin")) == BIG


@pytest.mark.parametrize("way", ["direct", "daemon"])
def test_a_dataset_of_the_hub(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for shard in range(3):
        hub.files[f"tars/{shard}.tar"] = tar_bytes(
            {f"{shard}{n}": {"txt": b"%d%d" % (shard, n)} for n in range(5)}
        )
    hub.lfs = hub.lfs.union(path for path in hub.files if path.endswith(".tar"))
    hub.uses = 2
    monkeypatch.setenv("CACHESVC", "off" if way == "direct" else "require")
    with Daemon(tmp_path / "node", ["--ram", "64MiB", "--allow", f"{ROOT}/"]) as daemon:
        monkeypatch.setenv("CACHESVC_SOCKET", daemon.socket_dir)
        data = open_dataset(f"{ROOT}/tars/{{0..2}}.tar", fields=("txt",))
        seen = [text for (texts,) in DataLoader(data, 4, shuffle=True) for text in texts]
        assert sorted(seen) == sorted(f"{shard}{n}" for shard in range(3) for n in range(5))
        data.close()
        if way == "daemon":
            assert run(["prefetch", "--format", "whole", f"{ROOT}/data/"]) == 0
            before = len([path for path, _ in hub.seen if path.startswith("/cdn/")])
            with cachesvc.path(f"{ROOT}/data/a b.bin") as path:
                assert Path(path).read_bytes() == BIG
            assert len([path for path, _ in hub.seen if path.startswith("/cdn/")]) == before, "no body again"
