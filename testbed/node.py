"""A daemon process that demo, benches and tests start, kill and restart."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, TypeVar

from cachesvc.config import CONTROL_SOCKET, GRANTS_SOCKET
from testbed import WAIT_S

READY_S = WAIT_S
_D = TypeVar("_D", bound="Daemon")


def open_files(pid: int) -> list[str]:
    """Names of the open files of a process, from /proc. Descriptors that close meanwhile are left out."""
    names = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):
            names.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return names


class Daemon:
    """`cachesvc serve` as a process, with its own directories below `root`. Context manager; may be killed and started
    again. Clients need `env`; only the daemon gets `credentials`."""

    forks: ClassVar[type[subprocess.Popen[Any]] | None] = None
    """What runs `testbed.service` instead of the command; tests take `ForkedProcess`, which saves the imports."""

    def __init__(
        self,
        root: Path,
        options: Sequence[str],
        credentials: Mapping[str, str] | None = None,
        ready_s: float = READY_S,
    ) -> None:
        self.root = root
        self._ready_s = ready_s
        # A socket's path has at most 107 characters; a test's temporary folder can be longer.
        self._sockets = tempfile.TemporaryDirectory(prefix="cs-")
        self.socket_dir = self._sockets.name
        self._options = [*options, "--socket", self.socket_dir, "--state-dir", str(root / "state")]
        self._credentials = dict(credentials or {})
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self: _D) -> _D:
        self.root.mkdir(parents=True, exist_ok=True)
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self._sockets.cleanup()

    @property
    def env(self) -> dict[str, str]:
        """Environment variables for clients."""
        return {"CACHESVC_SOCKET": self.socket_dir}

    @property
    def log(self) -> str:
        """Log of all daemons that were started so far."""
        return (self.root / "daemon.log").read_text()

    def start(self) -> Daemon:
        """Start the daemon and wait until it answers. Raises RuntimeError with its log."""
        self.launch()
        return self.wait_ready()

    def launch(self) -> None:
        """Start the daemon without waiting."""
        self.process = self.spawn()

    def take_over(self, *more: str) -> None:
        """Start a new daemon that takes over from the running one, with `more` options, and wait until it answers. Raises
        RuntimeError with their log."""
        if self.spawn("--takeover", *more).wait(self._ready_s):
            raise RuntimeError(f"the daemon was not replaced:\n{self.log}")
        self.wait_ready()

    def command(self) -> list[str]:
        """The daemon's command line."""
        return [sys.executable, "-m", "cachesvc", "serve", *self._options]

    def spawn(self, *more: str) -> subprocess.Popen[bytes]:
        """Start and return a daemon process with these options, without making it `self.process`."""
        command: list[str] = [*self.command(), *more]
        start: type[subprocess.Popen[Any]] = subprocess.Popen
        if command[:4] == [sys.executable, "-m", "cachesvc", "serve"] and self.forks is not None:
            command, start = [sys.executable, "-m", "testbed.service", *command[4:]], self.forks
        with open(self.root / "daemon.log", "ab") as log:
            env = {"CACHESVC_CONFIG": os.devnull, **os.environ, **self._credentials}
            return start(command, env=env, stdout=log, stderr=log)

    def wait_ready(self) -> Daemon:
        """Wait until the daemon that was started last answers. Raises RuntimeError with its log."""
        assert self.process is not None
        deadline = time.monotonic() + self._ready_s
        while not self.ready():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the daemon did not start:\n{self.log}")
            time.sleep(0.02)
        return self

    def ready(self) -> bool:
        """True when `self.process`, and no other daemon, answers on the sockets."""
        sockets = Path(self.socket_dir)
        if not (sockets / CONTROL_SOCKET).exists() or not (sockets / GRANTS_SOCKET).exists():
            return False
        from cachesvc.client.control import Control
        from cachesvc.core.errors import DaemonUnavailable

        try:
            with Control(self.socket_dir) as control:
                answers = control.status().pid
            return self.process is not None and answers in (self.process.pid, *self.children())
        except DaemonUnavailable:
            return False

    def children(self) -> list[int]:
        """The processes that the service's main process has started."""
        if self.process is None:
            return []
        pid = self.process.pid
        try:
            return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
        except OSError:
            return []

    @property
    def pid(self) -> int:
        """Process id of the daemon, the child of `process`."""
        return self.children()[0]

    def crash(self) -> None:
        """Send SIGKILL to the daemon alone, which its parent starts again."""
        os.kill(self.pid, signal.SIGKILL)

    def kill(self) -> None:
        """Send SIGKILL to the parent, and wait for its end and the daemon's. Nothing is cleaned up."""
        assert self.process is not None
        daemons = [os.pidfd_open(pid) for pid in self.children()]
        self.process.kill()
        self.process.wait()
        for daemon in daemons:
            ended = select.poll()
            ended.register(daemon, select.POLLIN)
            ended.poll()
            os.close(daemon)

    def stop(self) -> int:
        """Send SIGTERM and wait; return the exit code. A daemon that does not end within `WAIT_S` is killed."""
        if self.process is None:
            return 0
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(WAIT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        return self.process.returncode
