"""`cachesvc serve` whose daemon is forked from a process that has loaded its modules."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys

from cachesvc.__main__ import run
from cachesvc.daemon.parent.child_processes import launch_daemon
from cachesvc.daemon.parent.messages import Given, Program
from cachesvc.daemon.processes.spawn import channel_pair
from cachesvc.daemon.serve import run_daemon

log = logging.getLogger(__name__)


def fork_daemon(program: Program, given: Given, lock: int) -> tuple[int, socket.socket]:
    """Fork a daemon, or start that of another interpreter as users do. See `Launch`."""
    if program.executable != sys.executable:
        return launch_daemon(program, given, lock)
    ours, theirs = channel_pair()
    if pid := os.fork():
        theirs.close()
        return pid, ours
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        kept = {0, 1, 2, lock, theirs.fileno()}
        for name in os.listdir("/proc/self/fd"):
            if int(name) not in kept:
                try:
                    os.close(int(name))
                except OSError:
                    pass  # the listing itself
        os.chdir(program.directory)
        os.environ.clear()
        os.environ.update(program.environment)
        logging.getLogger().handlers.clear()
        code = run_daemon(given, theirs)
    except BaseException:
        log.exception("the daemon failed")
    finally:
        logging.shutdown()
        os._exit(code)


if __name__ == "__main__":
    sys.exit(run(["serve", *sys.argv[1:]], fork_daemon))
