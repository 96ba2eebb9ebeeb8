"""Identifies callers of the control API to the daemon: gRPC over a Unix socket does not pass the user, the grants socket
does.

The caller opens a connection to the grants socket without a dataset. The daemon reads the user from the kernel and
answers with a token, which identifies the caller while that connection lasts. See `daemon/access/tenants.py`.
"""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Mapping

from cachesvc.config import GRANTS_SOCKET
from cachesvc.core import wire
from cachesvc.core.errors import DeadlineExceeded
from cachesvc.core.limits import CONTROL_CALL_S
from cachesvc.core.wire import Op

TOKEN_KEY = "cachesvc-token"
JOB_KEY = "cachesvc-job"
JOB_VARIABLES = ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID")
JOB_CHARACTERS = 64


def job_name(environ: Mapping[str, str]) -> str:
    """Return the name that the launcher gave this process's job, in printable ASCII; "" without one."""
    given = next(filter(None, map(environ.get, JOB_VARIABLES)), "")
    return (
        ""
        if given == "none"
        else "".join(c for c in given if c.isascii() and c.isprintable())[:JOB_CHARACTERS]
    )


class CallerIdentity:
    """The token of one caller. Connects at the first call and again after a restart of the daemon; not for use across a
    fork."""

    def __init__(self, directory: str) -> None:
        self._path = f"{directory}/{GRANTS_SOCKET}"
        self._channel: socket.socket | None = None
        self._token = 0

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The gRPC metadata for one call; empty where the grants socket does not answer: the call itself then raises the
        error. Raises DeadlineExceeded."""
        if not self.is_alive():
            self.close()
        if self._channel is None:
            self._connect()
        if self._channel is None:
            return ()
        job = job_name(os.environ)
        return ((TOKEN_KEY, str(self._token)), *([(JOB_KEY, job)] if job else []))

    def close(self) -> None:
        """End the connection and invalidate the token."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def is_alive(self) -> bool:
        """True while the daemon holds the other end of the connection."""
        if self._channel is None:
            return False
        gone = select.poll()
        gone.register(self._channel, select.POLLRDHUP)
        return not gone.poll(0)

    def _connect(self) -> None:
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        channel.settimeout(CONTROL_CALL_S)
        try:
            channel.connect(self._path)
            channel.send(wire.encode(Op.IDENTIFY, wire.MAGIC))
            answer = wire.decode(channel.recv(wire.MAX_MESSAGE_BYTES))
            if answer.op is not Op.WELCOME:
                raise ValueError(answer.text)
        except TimeoutError:
            channel.close()
            raise DeadlineExceeded(
                f"the daemon at {self._path} did not answer in {CONTROL_CALL_S:.0f} s"
            ) from None
        except (OSError, ValueError):
            channel.close()
            return
        self._channel, self._token = channel, answer.size
