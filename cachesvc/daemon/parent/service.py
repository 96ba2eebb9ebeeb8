"""`cachesvc serve`: become the parent of a daemon, or ask a running parent to upgrade."""

from __future__ import annotations

import logging
import os
import socket
import sys

import msgspec

from cachesvc.config import (
    PARENT_SOCKET,
    Settings,
    check_socket_dir,
    open_files_advised,
)
from cachesvc.core.errors import DaemonUnavailable, NotAllowed, from_code
from cachesvc.core.limits import UPGRADE_S
from cachesvc.daemon.parent.child_processes import Launch
from cachesvc.daemon.parent.messages import PROTOCOL, Program, Release, UpgradeRequest, receive_answer
from cachesvc.daemon.parent.parent import Parent
from cachesvc.daemon.parent.socket_directory import SocketDirectory
from cachesvc.daemon.processes.datagrams import RECEIVE_ERRORS, send
from cachesvc.daemon.processes.logs import configure_logging
from cachesvc.system.memory import raise_open_files

log = logging.getLogger(__name__)


def run_service(settings: Settings, launch: Launch) -> int:
    """Run the service until SIGTERM or SIGINT, or upgrade the one that runs; return the exit code.

    Raises CacheError where it cannot start, and where an upgrade fails.
    """
    check_socket_dir(settings.socket_dir)
    configure_logging(settings.log_format, settings.log)
    if settings.takeover and _upgraded(settings):
        return 0
    raise_open_files(open_files_advised(settings.ram_bytes, settings.extent_bytes))
    return Parent(SocketDirectory.claim(settings.socket_dir), launch, [_release(settings)]).run()


def _release(settings: Settings) -> Release:
    """This program with these settings."""
    program = Program(sys.executable, dict(os.environ), os.getcwd())
    return Release(program, msgspec.json.encode(settings))


def _upgraded(settings: Settings) -> bool:
    """Have the running service become this program with these settings; False where none runs."""
    path = f"{settings.socket_dir}/{PARENT_SOCKET}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as channel:
        channel.settimeout(UPGRADE_S)
        try:
            channel.connect(path)
            send(channel, UpgradeRequest(PROTOCOL, _release(settings)))
            received = receive_answer(channel)
        except (FileNotFoundError, ConnectionRefusedError):
            log.info("there is no service to upgrade", extra={"socket": settings.socket_dir})
            return False
        except PermissionError:
            raise NotAllowed(
                f"{path} is not open to user {os.geteuid()}; upgrade as the user of the service that runs"
            ) from None
        except RECEIVE_ERRORS as error:
            raise DaemonUnavailable(f"the service did not answer ({error}); its log says more") from None
    if received is None:
        raise DaemonUnavailable("the service ended, or refused this user; its log says more")
    answer = received[0]
    if answer.code:
        raise from_code(answer.code, answer.message)
    log.info("the service runs this release now", extra={"socket": settings.socket_dir})
    return True
