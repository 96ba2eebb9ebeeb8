"""A sandbox that refuses memory files."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

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
