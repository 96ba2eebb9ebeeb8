"""Processes that work for a daemon."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from testbed.node import Daemon, open_files


def children(pid: int) -> list[int]:
    """Living descendants of a daemon: the fork server, fillers and builder."""
    return [each.pid for each in psutil.Process(pid).children(recursive=True)]


def threads_in_fuse(pid: int) -> int:
    """Threads of a process that wait for a FUSE mount, in the kernel."""
    count = 0
    for thread in os.listdir(f"/proc/{pid}/task"):
        with suppress(FileNotFoundError, ProcessLookupError):  # ended since it was listed
            count += Path(f"/proc/{pid}/task/{thread}/wchan").read_text() == "request_wait_answer"
    return count


def slow_fillers(folder: Path) -> tuple[Path, str]:
    """(file, PYTHONPATH): processes forked by a Python with this PYTHONPATH wait while the file exists."""
    (folder / "first").mkdir()
    held = folder / "first" / "held"
    lines = [
        "import os, time",
        "def hold():",
        f"    while os.path.exists({str(held)!r}):",
        "        time.sleep(0.01)",
        "os.register_at_fork(after_in_child=hold)",
        "",
    ]
    (folder / "first" / "sitecustomize.py").write_text("\n".join(lines))
    return held, f"{folder}/first:{os.environ.get('PYTHONPATH', '')}"


def held_memory(pid: int) -> list[str]:
    """Names of the RAM tier's memfds that a process has open."""
    return [name for name in open_files(pid) if name.startswith("/memfd:cachesvc:")]


@contextmanager
def stopped_fills(daemon: Daemon) -> Iterator[None]:
    """Stop all fillers and the builder with SIGSTOP, so that no fill proceeds meanwhile."""
    stopped = children(daemon.pid)
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
