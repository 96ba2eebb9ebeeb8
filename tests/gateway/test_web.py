"""Files of web servers and of a stand-in for Hugging Face's hub. The hub itself was not reached."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cachesvc.core.errors import NotFound
from cachesvc.gateway.filesystem import CachedFileSystem
from tests.support.faults.web_server import Hub, WebServer, serving

DATA = os.urandom(300_000)


@pytest.fixture(autouse=True)
def direct(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHESVC", "off")


def test_a_file_of_a_web_server_is_read_by_its_name() -> None:
    server = WebServer({"/x.bin": DATA, "/[1]{a,b}.bin": b"odd"})
    with serving(server):
        fs, place = CachedFileSystem(skip_instance_cache=True), server.url.replace("://", "/")
        assert fs.info(f"cachesvc://{place}/x.bin")["size"] == len(DATA)
        assert fs.cat_file(f"cachesvc://{place}/x.bin", 100_000, 200_000) == DATA[100_000:200_000]
        with fs.open(f"{place}/x.bin?part=1") as file:
            assert (file.seek(299_000), file.read()) == (299_000, DATA[299_000:])
        with pytest.raises(NotFound):
            fs.open(f"{place}/none.bin")


def test_files_of_the_hub_are_listed_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(
        {"README.md": b"# x", "data/a b.bin": DATA, "data/deep/z.bin": b"z"}, lfs=frozenset({"data/a b.bin"})
    )
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with serving(hub):
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        fs, root = CachedFileSystem(skip_instance_cache=True), "hf/datasets/owner/name"
        assert fs.cat_file(f"{root}@main/data/a b.bin", 5, 10) == DATA[5:10]
        assert fs.find(f"cachesvc://{root}") == [
            f"{root}/{path}" for path in ("README.md", "data/a b.bin", "data/deep/z.bin")
        ]
        assert fs.cat_file(f"{root}/data/a b.bin") == DATA
