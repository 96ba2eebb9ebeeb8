"""A process that sees another folder at the path than the daemon, as in a container."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from testbed.node import Daemon
from tests.support import datasets
from tests.support.users import as_user, needs_mounts


def read_by_gateway(path: str, settings: dict[str, str]) -> Callable[[], str]:
    def work() -> str:
        import os

        from cachesvc.gateway.filesystem import CachedFileSystem

        os.environ.update(settings)
        return CachedFileSystem().cat_file(f"{path}/sub/00.txt", 0, 5).decode("latin-1")

    return work


def read_by_loader(path: str, settings: dict[str, str]) -> Callable[[], str]:
    def work() -> str:
        import os

        from loader import open_dataset

        os.environ.update(settings)
        dataset = open_dataset(f"{path}/sub", format="files", labels="none", decode=None)
        return bytes(dataset[0])[:5].decode("latin-1")

    return work


@pytest.fixture
def other(folder: Path, tmp_path: Path) -> Path:
    """A folder with files of the same names."""
    datasets.write_files(tmp_path / "other", {f"sub/{n:02d}.txt": b"other" * 200 for n in range(20)})
    return tmp_path / "other"


@needs_mounts
@pytest.mark.parametrize(
    ("read", "policy"), [(read_by_gateway, "auto"), (read_by_gateway, "require"), (read_by_loader, "auto")]
)
def test_another_folder_at_the_path_is_an_error_and_never_the_files_of_the_daemon(
    read: Any, policy: str, folder: Path, other: Path, daemon: Daemon
) -> None:
    work = read(str(folder), {**daemon.env, "CACHESVC": policy})
    kind, said = as_user(0, work, mount=(str(other), str(folder)))
    assert kind == "InvalidInput"
    assert all(part in said for part in ("see different files at", "00.txt", "CACHESVC=off"))


@needs_mounts
def test_the_same_folder_mounted_elsewhere_is_the_same(folder: Path, tmp_path: Path, daemon: Daemon) -> None:
    body = (folder / "sub" / "00.txt").read_bytes()[:5].decode("latin-1")
    work = read_by_gateway(str(folder), {**daemon.env, "CACHESVC": "require"})
    assert as_user(0, work, mount=(str(folder), str(folder))) == body


@needs_mounts
def test_a_path_that_the_daemon_does_not_see_is_read_directly_in_auto(
    folder: Path, other: Path, tmp_path: Path, daemon: Daemon
) -> None:
    unseen = folder / "unseen"  # for the daemon there is nothing in it
    unseen.mkdir(exist_ok=True)
    settings = {**daemon.env, "CACHESVC": "auto", "XDG_CACHE_HOME": str(tmp_path)}
    assert as_user(0, read_by_gateway(str(unseen), settings), mount=(str(other), str(unseen))) == "other"


@needs_mounts
def test_a_path_that_the_daemon_does_not_see_names_the_cause_where_one_is_required(
    folder: Path, other: Path, daemon: Daemon
) -> None:
    unseen = folder / "unseen"
    unseen.mkdir(exist_ok=True)
    work = read_by_gateway(str(unseen), {**daemon.env, "CACHESVC": "require"})
    kind, said = as_user(0, work, mount=(str(other), str(unseen)))
    assert kind == "NotFound"
    assert all(part in said for part in ("the daemon does not see", "PrivateTmp=yes", "CACHESVC=auto"))
