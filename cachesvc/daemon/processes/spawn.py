"""Processes of ours that work beside the daemon. Each has a channel to it, and ends when that does."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Mapping

from cachesvc.config import SAFE_PATH
from cachesvc.daemon.processes import jobs

SEND_S = 1.0
"""A process that is stopped must not stop the daemon: its buffer takes thousands of messages before this counts."""


def channel_pair() -> tuple[socket.socket, socket.socket]:
    """Our end of a channel, and the other process's. Raises OSError."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * jobs.MAX_DATAGRAM_BYTES)
    ours.settimeout(SEND_S)
    return ours, theirs


def spawn(
    module: str, given: str, environment: Mapping[str, str], inherits: tuple[int, ...] = ()
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """`python -m MODULE FD`, which finds `given` in `CACHESVC_GIVEN`, and our end of its channel; it has the descriptors
    that it `inherits` under the same numbers. Raises OSError."""
    ours, theirs = channel_pair()
    with theirs:
        # Ctrl-C is the daemon's to answer: what is blocked here stays so in the child, from its first instruction.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno())],
                pass_fds=(theirs.fileno(), *inherits),
                env={**environment, **SAFE_PATH, "CACHESVC_GIVEN": given},
            )
        except OSError:
            ours.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return process, ours
