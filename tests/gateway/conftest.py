"""A folder of files, read without a daemon and with one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cachesvc.gateway.filesystem import CachedFileSystem
from testbed.node import Daemon
from tests.support import datasets

EXTENT_BYTES = 64 << 10


@pytest.fixture(autouse=True)
def new_instances() -> Iterator[None]:
    """fsspec keeps file systems, and with them their leases."""
    yield
    CachedFileSystem.clear_instance_cache()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of several extents, small files in folders, and a hidden one."""
    root, rng = tmp_path_factory.mktemp("files") / "data", np.random.default_rng(0)
    small = {f"sub/{n:02d}.txt": rng.bytes(1000) for n in range(20)}
    odd = {".zarray": b"{}", "sub/deep/[1]{a,b}.bin": b"odd", "sub/deep/plain.bin": b"plain"}
    datasets.write_files(root, {"big.bin": rng.bytes(1_000_003), **small, **odd})
    return root


@pytest.fixture(scope="module")
def daemon(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    options = ["--ram", "64MiB", "--extent-bytes", str(EXTENT_BYTES), "--allow", f"{folder}/"]
    with Daemon(tmp_path_factory.mktemp("node"), options) as found:
        yield found


@pytest.fixture(params=["direct", "daemon"])
def way(request: pytest.FixtureRequest, daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> str:
    """The way in which bytes come; set in this process."""
    monkeypatch.setenv("CACHESVC", "off" if request.param == "direct" else "require")
    monkeypatch.setenv("CACHESVC_SOCKET", daemon.socket_dir)
    return str(request.param)


@pytest.fixture
def fs() -> Iterator[CachedFileSystem]:
    """A file system that shares nothing with other tests."""
    found = CachedFileSystem(skip_instance_cache=True)
    yield found
    found.invalidate_cache()  # and release its leases: pytest refers to it for longer
