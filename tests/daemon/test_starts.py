"""Troubles at the start of a daemon that pass: they are waited for, and end it with a code that is worth a restart."""

from __future__ import annotations

import os
import platform
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachesvc.config import Settings
from cachesvc.core.errors import InvalidInput, NotReady
from cachesvc.daemon.ports import wait_for_addresses
from testbed import WAIT_S
from testbed.node import Daemon
from testbed.servers import free_ports
from tests.support.waiting import wait_until

SYSCALLS = {"x86_64": 319, "aarch64": 279}
REFUSE = """
import ctypes, os, struct, sys
number, command = int(sys.argv[1]), sys.argv[2:]
load, jump, answer = 0x20, 0x15, 0x06  # the number of the system call; is it this one; allow it or EPERM
code = [(load, 0, 0, 0), (jump, 0, 1, number), (answer, 0, 0, 0x00050001), (answer, 0, 0, 0x7FFF0000)]
filters = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in code))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code), ctypes.addressof(filters)))
libc = ctypes.CDLL(None, use_errno=True)
assert not libc.prctl(38, 1, 0, 0, 0)  # no new privileges
assert not libc.prctl(22, 2, program)  # a filter
os.execv(command[0], command)
"""
SMALL = ["--ram", "8MiB", "--extent-bytes", "1MiB", "--fillers", "1"]


@pytest.fixture
def taken() -> Iterator[tuple[socket.socket, str]]:
    """A port that another process holds, and its address."""
    with socket.create_server(("127.0.0.1", free_ports(1)[0])) as found:
        yield found, f"127.0.0.1:{found.getsockname()[1]}"


def settings(listen: str = "", metrics: str = "") -> Settings:
    return Settings(1 << 30, (), (), "/nowhere", "/nowhere", listen=listen, metrics=metrics)


def test_a_port_that_is_held_is_waited_for(tmp_path: Path, taken: tuple[socket.socket, str]) -> None:
    holder, address = taken
    daemon = Daemon(tmp_path, [*SMALL, "--metrics", address])
    daemon.launch()
    wait_until(lambda: f"--metrics {address} cannot be bound (Address already in use" in daemon.log)
    assert "waiting up to 60 s" in daemon.log
    assert sorted(os.listdir(daemon.socket_dir)) == ["lock", "parent.sock"]
    holder.close()
    daemon.wait_ready()
    assert daemon.log.count("cannot be bound") == 1
    assert daemon.stop() == 0


def test_a_daemon_that_waits_ends_at_once_when_it_is_told_to(
    tmp_path: Path, taken: tuple[socket.socket, str]
) -> None:
    daemon = Daemon(tmp_path, [*SMALL, "--metrics", taken[1]])
    daemon.launch()
    wait_until(lambda: "cannot be bound" in daemon.log)
    assert daemon.process is not None
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.process.wait(WAIT_S) == 0
    assert os.listdir(daemon.socket_dir) == ["lock"]


def test_a_port_that_stays_held_is_worth_a_restart(taken: tuple[socket.socket, str]) -> None:
    _, address = taken
    for option, given in (("listen", settings(address)), ("metrics", settings(metrics=address))):
        with pytest.raises(NotReady, match=f"--{option} {address} cannot be bound .Address already in use"):
            wait_for_addresses(given, 0.0)


def test_a_name_that_does_not_resolve_is_worth_a_restart() -> None:
    with pytest.raises(NotReady, match=r"--listen no-such-host\.invalid:7000 cannot be bound"):
        wait_for_addresses(settings("no-such-host.invalid:7000"), 0.0)


def test_a_name_that_never_resolves_is_not_waited_for() -> None:
    with pytest.raises(InvalidInput, match="choose another address"):
        wait_for_addresses(settings(f"{'x' * 64}.invalid:7000"), 60.0)


def test_a_disk_that_is_not_mounted_is_worth_a_restart(tmp_path: Path) -> None:
    cache = tmp_path / "nvme"
    cache.mkdir()
    if os.geteuid():
        pytest.skip("mounting takes root")
    daemon = Daemon(tmp_path / "node", [*SMALL, "--nvme", f"{cache}=1MiB,mounted"])
    (tmp_path / "node").mkdir()
    daemon.launch()
    assert daemon.process is not None
    assert daemon.process.wait(WAIT_S) == NotReady.code
    assert "and not on a file system of its own; mount its disk" in daemon.log
    assert os.listdir(cache) == []
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8M", "none", cache], check=True)
    try:
        daemon.start()
        assert daemon.stop() == 0
        assert os.listdir(cache) == ["cachesvc-nvme"]
    finally:
        subprocess.run(["umount", "-l", cache], check=True)


@pytest.mark.skipif(platform.machine() not in SYSCALLS, reason="the number of memfd_create is not known here")
def test_a_daemon_that_may_make_no_memory_files_says_what_to_allow(tmp_path: Path) -> None:
    serve = [sys.executable, "-m", "cachesvc", "serve", "--ram", "64MiB"]
    serve += ["--socket", str(tmp_path / "s"), "--state-dir", str(tmp_path / "state")]
    number = str(SYSCALLS[platform.machine()])
    command = [sys.executable, "-c", REFUSE, number, *serve]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 3
    assert "memfd_create is refused" in ended.stderr and "seccomp" in ended.stderr  # noqa: PT018
    assert "Traceback" not in ended.stderr
