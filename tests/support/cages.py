"""Memory cgroups for processes that tests start."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cachesvc.system.memory import CGROUPS
from testbed.node import Daemon
from tests.support.waiting import wait_until


class Cage:
    """A memory cgroup with a limit, of version 1 or 2."""

    def __init__(self, limit_bytes: int) -> None:
        second = (CGROUPS / "cgroup.controllers").exists()
        own = next(
            line.split(":", 2)[2]
            for line in Path("/proc/self/cgroup").read_text().splitlines()
            if (line.startswith("0::") if second else ":memory:" in line)
        )
        root = CGROUPS if second else CGROUPS / "memory"
        inside = root / own.lstrip("/")
        self.folder = (inside if inside.exists() else root) / f"cachesvc-test-{os.getpid()}"
        self.limit_bytes = limit_bytes
        self.folder.mkdir()
        try:
            (self.folder / ("memory.max" if second else "memory.limit_in_bytes")).write_text(str(limit_bytes))
        except OSError:
            self.folder.rmdir()
            raise

    def enter(self) -> None:
        """Move the calling process into the cgroup."""
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def remove(self) -> None:
        """Remove the cgroup, once its processes have ended."""
        wait_until(lambda: not (self.folder / "cgroup.procs").read_text())
        self.folder.rmdir()

    def oom_kills(self) -> int:
        """Number of its processes that the kernel killed for lack of memory."""
        names = ("memory.events", "memory.oom_control")
        counts = next(path.read_text() for name in names if (path := self.folder / name).exists())
        return int(dict(line.split() for line in counts.splitlines())["oom_kill"])

    def own_bytes(self) -> int:
        """Anonymous memory of its processes and the kernel memory for them, without files and memfds."""
        stat = self._stat()
        if "total_rss" not in stat:
            return stat["anon"] + stat.get("kernel", 0) + stat.get("sock", 0)
        return stat["total_rss"] + int((self.folder / "memory.kmem.usage_in_bytes").read_text())

    def free_bytes(self) -> int:
        """Memory left before the kernel kills a process. The kernel can drop file pages, but not memfds."""
        stat = self._stat()
        return self.limit_bytes - self.own_bytes() - stat.get("total_shmem", stat["shmem"])

    def _stat(self) -> dict[str, int]:
        lines = (line.split() for line in (self.folder / "memory.stat").read_text().splitlines())
        return {name: int(size) for name, size in lines}


@contextmanager
def caged(limit_bytes: int) -> Iterator[Cage]:
    """A cgroup that is removed in the end. Skips the test when this user may not create one."""
    try:
        found = Cage(limit_bytes)
    except (OSError, StopIteration) as error:
        pytest.skip(f"NOT TESTED: a lack of memory needs the right to create a memory cgroup: {error}")
    try:
        yield found
    finally:
        found.remove()


class Caged(Daemon):
    """A daemon that starts inside a cage."""

    def __init__(self, cage: Cage, root: Path, options: Sequence[str], **more: Any) -> None:
        super().__init__(root, options, **more)
        self._cage = cage

    def spawn(self, *more: str) -> subprocess.Popen[bytes]:
        with open(self.root / "daemon.log", "ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "cachesvc", "serve", *self._options, *more],
                env={**os.environ, **self._credentials},
                stdout=log,
                stderr=log,
                preexec_fn=self._cage.enter,
            )


HOG = """
import sys
held = []
for line in sys.stdin:
    held.append(b"x" * int(line))
    print("held", flush=True)
"""


class Hog:
    """A process in a cage that takes as much memory as the test says."""

    def __init__(self, cage: Cage) -> None:
        command = [sys.executable, "-c", HOG]
        self._process = subprocess.Popen(
            command, preexec_fn=cage.enter, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.size_bytes = 0

    def __enter__(self) -> Hog:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def grow(self, size_bytes: int) -> bool:
        """Take memory; tell whether the process has it, or was killed for it."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(b"%d\n" % size_bytes)
        self._process.stdin.flush()
        self.size_bytes += size_bytes
        return self._process.stdout.readline() == b"held\n"
