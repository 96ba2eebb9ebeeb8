"""A server process of a test, on loopback."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from testbed import WAIT_S

LIMIT_S = 600
"""The server ends by itself after this time, should the test be killed."""


class Server:
    """A process group that `start` makes and `stop` ends. Its output is in `log`."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self, command: Sequence[str]) -> None:
        assert not self.running
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                ["timeout", "--foreground", str(LIMIT_S), *command],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def signal(self, number: int) -> None:
        """Send a signal, such as SIGSTOP for a server that does not answer."""
        assert self._process is not None
        os.killpg(self._process.pid, number)

    def stop(self) -> None:
        """Kill the server, if it runs."""
        if self.running:
            self.signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait(WAIT_S)

    def output(self) -> str:
        return self._log.read_text(errors="replace")
