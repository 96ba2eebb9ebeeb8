"""`cachesvc stop`: end the daemon, and wait until it is gone."""

from __future__ import annotations

import os
import select
import signal
import socket
from contextlib import closing

import click

from cachesvc.cli import options, output
from cachesvc.client.control import find_daemon, no_answer
from cachesvc.config import GRANTS_SOCKET, default_socket_dir
from cachesvc.core.errors import DaemonUnavailable, DeadlineExceeded, NotAllowed
from cachesvc.daemon.unix_sockets import peer_process

STOP_S = 30.0
"""Timeout of the shutdown, which waits for fills that are being committed."""


@click.command()
@options.daemon
def stop(socket: str | None, json: bool) -> int:
    """End the daemon, as SIGTERM does. What is on NVMe stays; readers go on with what they hold."""
    directory = socket or find_daemon() or default_socket_dir()
    pid = stop_daemon(directory)
    output.report(json, f"the daemon in {directory} (pid {pid}) has ended", {"event": "stopped", "pid": pid})
    return 0


def stop_daemon(directory: str) -> int:
    """Send SIGTERM to the daemon of these sockets, and wait until the process is gone. Return its pid.

    Its NVMe directories are then free for the next daemon.

    Raises DaemonUnavailable where none answers, NotAllowed for another user's, DeadlineExceeded where it goes on.
    """
    pid = _listener(f"{directory}/{GRANTS_SOCKET}")
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        raise DaemonUnavailable(f"the daemon (pid {pid}) has just ended") from None
    with closing(os.fdopen(handle, "rb", buffering=0)):
        try:
            signal.pidfd_send_signal(handle, signal.SIGTERM)
        except PermissionError:
            raise NotAllowed(f"the daemon (pid {pid}) is another user's; ask that user, or root") from None
        waiting = select.poll()
        waiting.register(handle, select.POLLIN)
        if not waiting.poll(STOP_S * 1000):
            raise DeadlineExceeded(
                f"the daemon (pid {pid}) did not stop within {STOP_S:.0f} s; see {directory}"
            )
    return pid


def _listener(path: str) -> int:
    """Return the process that listens at a socket, as the kernel states it: a pid that a daemon tells may be one of another
    PID namespace, and here another process."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        try:
            probe.connect(path)
        except OSError as error:
            raise no_answer(path, error) from None
        pid, _ = peer_process(probe)
    if not pid:
        raise NotAllowed(f"the daemon at {path} runs in another PID namespace; end it there")
    return pid
