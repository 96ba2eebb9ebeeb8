"""The socket and state directories removed under a running daemon, by a cleaner of temporary files or a logout."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachesvc.catalog.options import Options
from cachesvc.client.control import Control
from cachesvc.client.grants import DaemonGrants
from cachesvc.client.protocol import Granted
from cachesvc.core.model import DatasetId
from testbed import WAIT_S
from testbed.node import Daemon
from tests.support.shared_daemon import for_one_test
from tests.support.waiting import wait_until

OPTIONS = Options(format="records", record_bytes=4096)
SOCKETS = ["cachesvc.sock", "grants.sock", "parent.sock"]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    root = tmp_path_factory.mktemp("directories")
    with Daemon(root, ["--ram", "16MiB", "--extent-bytes", "1MiB", "--fillers", "1"]) as found:
        yield found


@pytest.fixture
def daemon(shared: Daemon) -> Iterator[Daemon]:
    yield from for_one_test(shared)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "0.bin").write_bytes(os.urandom(2 << 20))
    return tmp_path


def opened(daemon: Daemon, data: Path) -> DatasetId:
    with Control(daemon.socket_dir) as control:
        found = control.open_dataset([str(data)], OPTIONS, refresh=True).id
        assert [reply.done for reply in control.prefetch(found)][-1]
    return found


def in_place(daemon: Daemon) -> bool:
    return set(os.listdir(daemon.socket_dir)) == {*SOCKETS, "lock"} and daemon.ready()


def test_a_socket_directory_that_is_removed_is_made_again_and_readers_go_on(
    daemon: Daemon, data: Path
) -> None:
    os.chmod(daemon.socket_dir, 0o750)
    dataset = opened(daemon, data)
    reader = DaemonGrants(daemon.socket_dir, dataset)
    (granted,) = reader.acquire([0], WAIT_S)
    with Control(daemon.socket_dir) as control:
        control.status()
        shutil.rmtree(daemon.socket_dir)
        # The call that the new server ends is repeated by the client: it has a connection of its own to the old one.
        wait_until(lambda: os.path.isdir(daemon.socket_dir) and in_place(daemon))
        assert control.status().pid == daemon.pid
    assert "the sockets were removed and are made again" in daemon.log
    (again,) = reader.acquire([1], WAIT_S)
    assert [type(granted), type(again)] == [Granted, Granted]
    reader.close()
    assert opened(daemon, data) == dataset


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SOCKETS, "lock"])
def test_each_file_of_the_socket_directory_is_made_again(daemon: Daemon, name: str) -> None:
    path = Path(daemon.socket_dir, name)
    path.unlink()
    wait_until(lambda: path.exists() and in_place(daemon))
    second = daemon.spawn()
    assert second.wait(WAIT_S) == 2, "the lock is held again"


def test_a_state_directory_that_is_removed_is_made_again(daemon: Daemon, data: Path) -> None:
    state = daemon.root / "state"
    first = opened(daemon, data)
    shutil.rmtree(state)
    wait_until(lambda: (state / "catalogs").is_dir() and (state / "metadata").is_dir())
    assert (state / "catalogs").stat().st_mode & 0o077 == 0
    (data / "1.bin").write_bytes(os.urandom(1 << 20))
    second = opened(daemon, data)
    assert second != first
    with Control(daemon.socket_dir) as control:
        control.pin(second, True)
        assert {row.dataset.id: row.pinned for row in control.list()}[second]
    assert "the state directory was removed and is made again" in daemon.log


def test_a_daemon_that_another_one_followed_says_so_and_leaves_it_alone(tmp_path: Path) -> None:
    with Daemon(tmp_path, ["--ram", "8MiB", "--extent-bytes", "1MiB", "--fillers", "1"]) as daemon:
        first, served_by = daemon.process, daemon.pid
        assert first is not None
        os.kill(served_by, signal.SIGSTOP)  # it must not be the quicker one
        shutil.rmtree(daemon.socket_dir)
        daemon.start()
        os.kill(served_by, signal.SIGCONT)
        wait_until(lambda: "a daemon already serves" in daemon.log)
        assert daemon.ready(), "the second one"
        first.terminate()
        assert first.wait(WAIT_S) == 0
        wait_until(lambda: in_place(daemon))  # gRPC removes the file at a server's path, whosever it is
