"""Background priority of fillers, and the standard descriptors of the daemon and its fillers."""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
import sys
from pathlib import Path
from platform import machine

import pytest

from cachesvc.daemon.processes import threads as background
from testbed.node import Daemon
from tests.support.processes import children
from tests.support.waiting import wait_until

_SHOW = """
import ctypes, os, sys, threading
from cachesvc.daemon.processes.threads import run_in_background
def show():
    attributes = ctypes.create_string_buffer(48)
    ctypes.CDLL(None).syscall(int(sys.argv[1]), 0, attributes, 48, 0)
    os.write(1, attributes.raw)
run_in_background()
thread = threading.Thread(target=show)
thread.start()
thread.join()
"""


@pytest.mark.skipif(machine() != "x86_64", reason="the number of sched_getattr(2) is known for x86-64 alone")
def test_a_background_process_is_nice_and_all_its_threads_have_a_long_slice() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SHOW, "315"], stdout=subprocess.PIPE, check=True, timeout=60
    )
    _, policy, _, niceness, _, slice_ns, _, _ = struct.unpack("=IIQiIQQQ", done.stdout)
    assert policy == os.SCHED_OTHER
    assert niceness == min(19, os.nice(0) + background.NICE)
    if tuple(map(int, os.uname().release.split("-")[0].split(".")[:2])) >= (6, 12):
        assert slice_ns == background.SLICE_NS


def test_a_c_library_without_the_call_sets_only_the_niceness(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "nice", lambda _: 15)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    background.run_in_background()


@pytest.mark.slow
def test_numbers_of_closed_standard_descriptors_are_not_reused_for_extents(tmp_path: Path) -> None:
    """Otherwise a library that writes to standard error would write into an extent."""

    class Closing(Daemon):
        def spawn(self, *more: str) -> subprocess.Popen[bytes]:
            command = [sys.executable, "-m", "cachesvc", "serve", *self._options, *more]
            return subprocess.Popen(["sh", "-c", 'exec "$@" 0<&- >&- 2>&-', "sh", *command])

    with Closing(tmp_path, ["--ram", "8MiB", "--extent-bytes", "4096", "--fillers", "1"]) as daemon:
        wait_until(lambda: len(children(daemon.pid)) == 3)
        for pid in (daemon.pid, *children(daemon.pid)):
            assert {os.readlink(f"/proc/{pid}/fd/{number}") for number in range(3)} == {os.devnull}
