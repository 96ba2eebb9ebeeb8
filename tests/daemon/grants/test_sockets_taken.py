"""A file or foreign socket at a path of the daemon's sockets is left alone, and named in a one-line error."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest

from cachesvc.core.errors import InvalidInput
from cachesvc.daemon.unix_sockets import check_free, make_room
from testbed.node import Daemon
from tests.support.shell import complaint, serve
from tests.support.waiting import wait_until

SOCKETS = ("cachesvc.sock", "grants.sock", "parent.sock")
KINDS = (socket.SOCK_STREAM, socket.SOCK_SEQPACKET, socket.SOCK_DGRAM)
SMALL = ("--ram", "8MiB", "--extent-bytes", "1MiB", "--fillers", "1")
END_S = 30.0


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory, made the working directory."""
    found = tmp_path / "s"
    found.mkdir()
    monkeypatch.chdir(found)
    return found


def bound(path: Path | str, kind: socket.SocketKind = socket.SOCK_STREAM) -> socket.socket:
    """Bind a socket to a path, and listen where its kind can."""
    found = socket.socket(socket.AF_UNIX, kind)
    found.bind(str(path))
    if kind != socket.SOCK_DGRAM:
        found.listen(1)
    return found


def refused(directory: Path, name: str) -> None:
    """Check that `serve` ends with one line that names the path, and leaves only its lock."""
    before = os.lstat(directory / name)
    ended = serve(*SMALL, "--socket", str(directory), "--state-dir", str(directory.parent / "state"))
    assert ended.returncode == InvalidInput.code, ended.stderr
    error = complaint(ended)
    assert f"{directory / name}" in error
    assert "--socket" in error
    assert os.path.samestat(os.lstat(directory / name), before)
    assert set(os.listdir(directory)) == {name, "lock"}


@pytest.mark.parametrize("name", SOCKETS)
def test_a_directory_in_a_sockets_place_stays(directory: Path, name: str) -> None:
    (directory / name).mkdir()
    refused(directory, name)


def test_a_file_in_a_sockets_place_stays(directory: Path) -> None:
    (directory / "cachesvc.sock").write_text("mine")
    refused(directory, "cachesvc.sock")
    assert (directory / "cachesvc.sock").read_text() == "mine"


@pytest.mark.parametrize("name", SOCKETS)
def test_a_socket_at_which_another_process_listens_stays(directory: Path, name: str) -> None:
    with bound(directory / name):
        refused(directory, name)


@pytest.mark.parametrize("kind", KINDS)
def test_a_dead_socket_of_any_kind_is_removed_and_a_live_one_is_not(
    directory: Path, kind: socket.SocketKind
) -> None:
    with bound("x", kind), pytest.raises(InvalidInput, match="another process listens"):
        make_room("x")
    assert os.path.exists("x")
    check_free("x")
    make_room("x")
    assert not os.path.exists("x")


def test_a_socket_with_a_full_queue_is_in_use(directory: Path) -> None:
    with bound("x") as listener, socket.socket(socket.AF_UNIX) as one, socket.socket(socket.AF_UNIX) as two:
        listener.listen(0)
        for each in (one, two):
            each.setblocking(False)
        one.connect("x")
        with pytest.raises(BlockingIOError):
            two.connect("x")
        with pytest.raises(InvalidInput):
            check_free("x")


def test_a_dangling_link_is_no_socket(directory: Path) -> None:
    os.symlink("nowhere", "x")
    with pytest.raises(InvalidInput, match="no socket"):
        make_room("x")


def test_a_daemon_that_ends_removes_only_its_own_sockets(tmp_path: Path) -> None:
    with Daemon(tmp_path / "node", SMALL) as daemon:
        directory = Path(daemon.socket_dir)
        for name in SOCKETS:
            os.rename(directory / name, directory / f"{name}.old")
            (directory / name).write_text("mine")
        assert daemon.stop() == 0, daemon.log
        assert [(directory / name).read_text() for name in SOCKETS] == ["mine"] * len(SOCKETS)


@pytest.mark.slow
@pytest.mark.parametrize("ignored", [False, True], ids=["closed terminal", "nohup"])
def test_a_closed_terminal_ends_a_daemon_cleanly_but_not_under_nohup(
    ignored: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Daemon, "forks", None)  # which inherits what is ignored here
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    stdin, (terminal, other_end) = os.dup(0), os.openpty()
    os.dup2(other_end, 0)
    try:
        with Daemon(tmp_path / "node", SMALL) as daemon:
            assert daemon.process is not None
            if not ignored:
                daemon.process.send_signal(signal.SIGHUP)
                wait_until(lambda: "the settings are reloaded" in daemon.log)
            os.close(terminal)
            daemon.process.send_signal(signal.SIGHUP)
            if ignored:
                assert daemon.ready()
            else:
                assert daemon.process.wait(END_S) == 0
                assert not set(SOCKETS) & set(os.listdir(daemon.socket_dir))
    finally:
        os.dup2(stdin, 0)
        for fd in (stdin, other_end):
            os.close(fd)
        signal.signal(signal.SIGHUP, before)
