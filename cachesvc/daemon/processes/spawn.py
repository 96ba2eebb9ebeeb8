"""Child processes of the daemon. Each has a channel to the daemon, and ends when the channel closes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping

import msgspec

from cachesvc.config import SAFE_PATH
from cachesvc.daemon.processes.datagrams import MAX_DATAGRAM_BYTES

_OF_THE_DAEMON = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
SEND_S = 1.0
"""A send blocks no longer, so a stopped child does not stop the daemon; its buffer takes thousands of messages first."""

_QUIET = {"GRPC_VERBOSITY": "NONE"}
"""gRPC's own lines have no level and name no node; what they tell is in the agent's lines."""
_KEPT_VARIABLES = frozenset(
    {"PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "HOME", "LANG", "TZ"}
    | {"GRPC_VERBOSITY", "CACHESVC_ETCD_USER"}
)


def environment_of_agent() -> dict[str, str]:
    """Return the variables that Python and the list of members need, and none with credentials of sources, since the peer
    agent faces the network."""
    return _QUIET | {name: value for name, value in os.environ.items() if name in _KEPT_VARIABLES}


def channel_pair() -> tuple[socket.socket, socket.socket]:
    """Return the daemon's end of a new channel, and the child's. Raises OSError."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MAX_DATAGRAM_BYTES)
    ours.settimeout(SEND_S)
    return ours, theirs


def spawn(
    module: str,
    given: object,
    environment: Mapping[str, str],
    inherits: tuple[int, ...] = (),
    executable: str = sys.executable,
    directory: str | None = None,
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start `python -m MODULE FD`, perhaps of another interpreter and in another directory; return the process and this
    process's end of its channel. Raises OSError.

    The child finds `given` as JSON in the variable `CACHESVC_GIVEN`, and `inherits` the descriptors under the same numbers.
    """
    ours, theirs = channel_pair()
    with theirs:
        # Only the daemon handles these, which may come to the whole group: the child inherits the blocked signals, from its
        # first instruction on.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _OF_THE_DAEMON)
        try:
            process = subprocess.Popen(
                [executable, "-m", module, str(theirs.fileno())],
                pass_fds=(theirs.fileno(), *inherits),
                cwd=directory,
                env={**environment, **SAFE_PATH, "CACHESVC_GIVEN": msgspec.json.encode(given).decode()},
            )
        except OSError:
            ours.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return process, ours
