"""Starts the real things that demo, bench and tests run against: a daemon process of our own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from cachesvc.config import CONTROL_SOCKET, GRANTS_SOCKET
from testbed import WAIT_S

READY_S = WAIT_S


def open_files(pid: int) -> list[str]:
    """What a process has open, as /proc names it. Of a process that lives, some closes while we look."""
    names = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):
            names.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return names


class Daemon:
    """`cachesvc serve` as a process, with directories of its own below `root`. Context manager; `kill` and
    `start` again at will. `env` is what its clients need; `credentials` only it gets."""

    def __init__(
        self,
        root: Path,
        options: Sequence[str],
        credentials: Mapping[str, str] | None = None,
        ready_s: float = READY_S,
    ) -> None:
        self.root = root
        self._ready_s = ready_s
        # A socket's path ends at 107 characters; temporary folders can be deeper.
        self._sockets = tempfile.TemporaryDirectory(prefix="cs-")
        self.socket_dir = self._sockets.name
        self._options = [*options, "--socket", self.socket_dir, "--state-dir", str(root / "state")]
        self._credentials = dict(credentials or {})
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Daemon:
        self.root.mkdir(parents=True, exist_ok=True)
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self._sockets.cleanup()

    @property
    def env(self) -> dict[str, str]:
        """For clients."""
        return {"CACHESVC_SOCKET": self.socket_dir}

    @property
    def log(self) -> str:
        """What the daemon has written so far."""
        return (self.root / "daemon.log").read_text()

    def start(self) -> Daemon:
        """Start and wait until both sockets are there. Raises RuntimeError with the daemon's log."""
        self.launch()
        return self._wait()

    def launch(self) -> None:
        """Start it, and do not wait."""
        self.process = self.spawn()

    def take_over(self, *more: str) -> subprocess.Popen[bytes]:
        """Start a new daemon, with more options, that takes over from the one that runs, and wait until it has; the
        old one, which is about to end or has ended. Raises RuntimeError with their log."""
        assert self.process is not None
        old, self.process = self.process, self.spawn("--takeover", *more)
        self._wait()
        return old

    def spawn(self, *more: str) -> subprocess.Popen[bytes]:
        """A new daemon of these options; which one is ours, the caller says."""
        with open(self.root / "daemon.log", "ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "cachesvc", "serve", *self._options, *more],
                env={**os.environ, **self._credentials},
                stdout=log,
                stderr=log,
            )

    def _wait(self) -> Daemon:
        assert self.process is not None
        deadline = time.monotonic() + self._ready_s
        while not self.ready():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the daemon did not start:\n{self.log}")
            time.sleep(0.02)
        return self

    def ready(self) -> bool:
        """Whether this very process answers."""
        here = Path(self.socket_dir)
        if not (here / CONTROL_SOCKET).exists() or not (here / GRANTS_SOCKET).exists():
            return False
        from cachesvc.client.control import Control
        from cachesvc.core.errors import DaemonUnavailable

        try:
            with Control(self.socket_dir) as control:
                return control.status().pid == (self.process.pid if self.process else 0)
        except DaemonUnavailable:
            return False

    @property
    def pid(self) -> int:
        """Of the daemon that was started last."""
        assert self.process is not None
        return self.process.pid

    def kill(self) -> None:
        """SIGKILL: nothing is cleaned up."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """SIGTERM and wait; the exit code."""
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
