"""Goes on as the program that the parent has become: `python -m cachesvc.daemon.parent FD`."""

from __future__ import annotations

import logging
import os
import socket
import sys

import msgspec

from cachesvc.config import Settings, open_files_advised
from cachesvc.core.errors import CacheError
from cachesvc.daemon.parent.child_processes import launch_daemon
from cachesvc.daemon.parent.held_copies import left_state
from cachesvc.daemon.parent.parent import Parent
from cachesvc.daemon.parent.socket_directory import SocketDirectory
from cachesvc.daemon.processes.logs import configure_logging
from cachesvc.system.memory import raise_open_files

log = logging.getLogger(__name__)


def main() -> int:
    """Run until a signal ends the service; return the exit code."""
    state = left_state(int(sys.argv[1]))
    settings = msgspec.json.decode(state.releases[0].settings, type=Settings)
    configure_logging(settings.log_format, settings.log)
    raise_open_files(open_files_advised(settings.ram_bytes, settings.extent_bytes))
    sockets = SocketDirectory(settings.socket_dir, state.lock, socket.socket(fileno=state.listener))
    for fd in (state.lock, state.listener):
        os.set_inheritable(fd, False)
    parent = Parent(sockets, launch_daemon, state.releases)
    parent.resume(state)
    try:
        return parent.run()
    except CacheError as error:
        log.error("%s", error)
        return error.code


if __name__ == "__main__":
    sys.exit(main())
