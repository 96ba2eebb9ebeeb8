"""A handle of the other daemon's process."""

from __future__ import annotations

import os
import select
import signal
from contextlib import suppress


class ProcessHandle:
    """A process of this machine, held by a pidfd, so that its pid cannot come to mean another. A context manager."""

    def __init__(self, pid: int) -> None:
        """Raises OSError where no such process runs, or where it is in another PID namespace."""
        self.pid = pid
        self._fd = os.pidfd_open(pid)

    def __enter__(self) -> ProcessHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the handle; the process goes on."""
        os.close(self._fd)

    def ended(self, timeout_s: float) -> bool:
        """Wait for the end of the process; False where it does not end in time."""
        end = select.poll()
        end.register(self._fd, select.POLLIN)
        return bool(end.poll(timeout_s * 1000))

    def kill(self, timeout_s: float) -> None:
        """Send SIGKILL and wait for the end. A process that hangs in the kernel runs no more user code after it."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._fd, signal.SIGKILL)
        self.ended(timeout_s)
