"""A daemon that the tests of a module share, and pictures."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.node import Daemon
from tests.support.shared_daemon import for_one_test


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide any settings of the environment."""
    for name in list(os.environ):
        if name.startswith("CACHESVC_"):
            monkeypatch.delenv(name)


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    """Write six labelled files in two folders."""
    for number in range(6):
        folder = tmp_path / "pets" / ("cat" if number % 2 else "dog")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}.jpg").write_bytes(os.urandom(1000))
    return tmp_path / "pets"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """Run a daemon with room to keep four extents, and some for streaming."""
    root = tmp_path_factory.getbasetemp()
    options = ["--ram", "6MiB", "--allow", str(root), "--extent-bytes", "1MiB", "--fillers", "1"]
    with Daemon(tmp_path_factory.mktemp("node"), options) as found:
        yield found


@pytest.fixture
def daemon(shared: Daemon, monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    monkeypatch.setenv("CACHESVC_SOCKET", shared.socket_dir)
    yield from for_one_test(shared)
