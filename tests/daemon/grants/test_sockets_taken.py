"""What else lies where the daemon's sockets go: it is left alone, and said in one line."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest

from cachesvc.core.errors import InvalidInput
from cachesvc.daemon.grants.listening import check_free, make_room
from testbed.node import Daemon
from tests.support.shell import complaint, serve

SOCKETS = ("cachesvc.sock", "grants.sock", "takeover.sock")
KINDS = (socket.SOCK_STREAM, socket.SOCK_SEQPACKET, socket.SOCK_DGRAM)
SMALL = ("--ram", "8MiB", "--extent-bytes", "1MiB", "--fillers", "1")
END_S = 30.0


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory, which is the working directory."""
    found = tmp_path / "s"
    found.mkdir()
    monkeypatch.chdir(found)
    return found


def bound(path: Path | str, kind: socket.SocketKind = socket.SOCK_STREAM) -> socket.socket:
    """A socket at a path; it listens, where its kind can."""
    found = socket.socket(socket.AF_UNIX, kind)
    found.bind(str(path))
    if kind != socket.SOCK_DGRAM:
        found.listen(1)
    return found


def refused(place: Path, name: str) -> None:
    """`serve` ends with one line that names the path, and has left nothing but its lock."""
    before = os.lstat(place / name)
    ended = serve(*SMALL, "--socket", str(place), "--state-dir", str(place.parent / "state"))
    assert ended.returncode == InvalidInput.code, ended.stderr
    said = complaint(ended)
    assert f"{place / name}" in said
    assert "--socket" in said
    assert os.path.samestat(os.lstat(place / name), before)
    assert set(os.listdir(place)) == {name, "lock"}


@pytest.mark.parametrize("name", SOCKETS)
def test_a_directory_in_a_sockets_place_is_refused(place: Path, name: str) -> None:
    (place / name).mkdir()
    refused(place, name)


def test_a_users_file_in_a_sockets_place_stays(place: Path) -> None:
    (place / "cachesvc.sock").write_text("mine")
    refused(place, "cachesvc.sock")
    assert (place / "cachesvc.sock").read_text() == "mine"


@pytest.mark.parametrize("name", SOCKETS)
def test_a_socket_at_which_others_listen_is_refused(place: Path, name: str) -> None:
    with bound(place / name):
        refused(place, name)


@pytest.mark.parametrize("option", ["--listen", "--share", "--metrics"])
def test_a_port_that_is_taken_leaves_no_socket_behind(place: Path, option: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        ended = serve(
            *SMALL, option, address, "--socket", str(place), "--state-dir", str(place.parent / "state")
        )
    assert ended.returncode == InvalidInput.code, ended.stderr
    assert f"{option} {address} cannot be bound" in complaint(ended)
    assert os.listdir(place) == ["lock"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_dead_socket_of_any_kind_makes_room_and_a_live_one_does_not(
    place: Path, kind: socket.SocketKind
) -> None:
    with bound("x", kind), pytest.raises(InvalidInput, match="another process listens"):
        make_room("x")
    assert os.path.exists("x")
    check_free("x")
    make_room("x")
    assert not os.path.exists("x")


def test_a_full_queue_is_life_too(place: Path) -> None:
    with bound("x") as listener, socket.socket(socket.AF_UNIX) as one, socket.socket(socket.AF_UNIX) as two:
        listener.listen(0)
        for each in (one, two):
            each.setblocking(False)
        one.connect("x")
        with pytest.raises(BlockingIOError):
            two.connect("x")
        with pytest.raises(InvalidInput):
            check_free("x", os.getpid())


def test_the_process_that_is_known_may_listen(place: Path) -> None:
    with bound("x"):
        check_free("x", os.getpid())
        with pytest.raises(InvalidInput):
            check_free("x", 1)


def test_a_link_that_leads_nowhere_is_no_socket(place: Path) -> None:
    os.symlink("nowhere", "x")
    with pytest.raises(InvalidInput, match="no socket"):
        make_room("x")


def test_a_daemon_that_ends_removes_its_own_sockets_only(tmp_path: Path) -> None:
    with Daemon(tmp_path / "node", SMALL) as daemon:
        place = Path(daemon.socket_dir)
        for name in SOCKETS:
            os.rename(place / name, place / f"{name}.old")
            (place / name).write_text("mine")
        assert daemon.stop() == 0, daemon.log
        assert [(place / name).read_text() for name in SOCKETS] == ["mine"] * len(SOCKETS)


def test_a_takeover_is_not_begun_where_others_listen(tmp_path: Path) -> None:
    with Daemon(tmp_path / "node", SMALL) as daemon:
        control = Path(daemon.socket_dir, "cachesvc.sock")
        os.rename(control, f"{control}.old")
        with bound(control):
            assert daemon.spawn("--takeover").wait(END_S) == InvalidInput.code
        assert f"another process listens at {control}" in daemon.log
        os.replace(f"{control}.old", control)
        assert daemon.ready()


@pytest.mark.parametrize("ignored", [False, True], ids=["closed terminal", "nohup"])
def test_a_closed_terminal_ends_a_daemon_cleanly_unless_it_was_told_to_stay(
    ignored: bool, tmp_path: Path
) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        with Daemon(tmp_path / "node", SMALL) as daemon:
            assert daemon.process is not None
            daemon.process.send_signal(signal.SIGHUP)
            if ignored:
                assert daemon.ready()
            else:
                assert daemon.process.wait(END_S) == 0
                assert not set(SOCKETS) & set(os.listdir(daemon.socket_dir))
    finally:
        signal.signal(signal.SIGHUP, before)
