"""The parent process: it starts the daemon, starts it again when it dies, and replaces it by another release.

The order of events in an upgrade, and the effect when a process dies after each:
  1. the new daemon is started, and imports what it needs     it dies: the old daemon goes on
  2. it asks for the copies: it is ready. The old daemon is told to leave, ends its fills and closes its sockets
  3. the parent becomes its new self, with the descriptors of all copies (`ParentState`)
  4. the new daemon gets the copies and serves                it dies from 2 on: the old release is run again

The death of the parent itself is a crash: the kernel kills the daemon, and what is in RAM is fetched again.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from cachesvc.core.errors import CacheError, DaemonUnavailable, InvalidInput, from_code
from cachesvc.daemon.loop.loop import Loop
from cachesvc.daemon.parent.child_processes import DaemonProcess, Launch, S3Process
from cachesvc.daemon.parent.held_copies import HeldCopies, ParentState, adopted, become
from cachesvc.daemon.parent.messages import (
    LEAVE,
    PROTOCOL,
    CopiesHeld,
    CopyDropped,
    DaemonServes,
    DropCopy,
    FromDaemon,
    GiveCopies,
    Given,
    HoldCopy,
    Release,
    StartFailed,
    ToDaemon,
    UpgradeAnswer,
    receive_from_daemon,
    receive_upgrade,
)
from cachesvc.daemon.parent.socket_directory import SocketDirectory
from cachesvc.daemon.processes.datagrams import send
from cachesvc.daemon.unix_sockets import peer_process
from cachesvc.system.memory import memories

log = logging.getLogger(__name__)
FIRST_PAUSE_S, LAST_PAUSE_S = 0.1, 5.0
"""The pause before a daemon that died is started again. It doubles with each death, until one daemon has served for
`CALM_S`."""
CALM_S = 60.0
LEAVE_S = 15.0
"""The time that a daemon has to leave before it is killed: it ends its fills in at most 10 s."""
LINGER_S = 5.0
"""The time that a process which has closed its channel has to end; after that it may hang in a disk."""
LOOK_S = 1.0
"""How often the socket directory is looked at."""
SHED_S = 1.0
"""How often the memory is measured while no daemon does so."""
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""SIGHUP only where the terminal has gone: else it has the daemon reload its settings."""


@dataclass(slots=True)
class _Upgrade:
    """An upgrade under way: the daemon to come, and the connection that asked for it."""

    release: Release
    daemon: DaemonProcess
    connection: socket.socket


class Parent:
    """Runs in a process of one thread."""

    def __init__(self, sockets: SocketDirectory, launch: Launch, releases: Sequence[Release]) -> None:
        """`releases`: the one to run, and perhaps the one before, which is run where the first does not start."""
        self._sockets = sockets
        self._launch = launch
        self._releases = list(releases)
        self._loop = Loop()
        self._copies = HeldCopies()
        self._s3 = S3Process()
        self._daemon: DaemonProcess | None = None
        self._upgrade: _Upgrade | None = None
        self._asked_by: socket.socket | None = None
        self._start_at = 0.0
        self._shed_at = 0.0
        self._pause_s = FIRST_PAUSE_S
        self._served = self._stopping = False
        self._code = 0
        self._failure: CacheError | None = None
        self._look_at = 0.0
        self._said = self._crash = ""
        self._in_terminal = os.isatty(0)
        self._connections: dict[int, socket.socket] = {}

    def resume(self, state: ParentState) -> None:
        """Go on with what this process held before it became this program."""
        for copy, fd in state.copies:
            os.set_inheritable(fd, False)
            self._copies.hold(copy, fd)
        pid, channel = state.daemon
        self._daemon = self._watched(pid, adopted(channel))
        self._daemon.asks = self._served = True
        self._asked_by = adopted(state.asked_by)
        self._start_at = math.inf
        self._give(self._daemon)

    def run(self) -> int:
        """Run until a signal ends the service; return the daemon's exit code. Raises the CacheError of a daemon that could
        not start at all."""
        self._loop.watch(self._sockets.listener.fileno(), self._connected)
        for number in STOPPING:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                does = self._hung_up if number == signal.SIGHUP else self._stop
                signal.signal(number, lambda *_, does=does: self._loop.post(does))
        signal.signal(signal.SIGCHLD, lambda *_: self._loop.post(self._reap))
        signal.set_wakeup_fd(self._loop.wake_fd, warn_on_full_buffer=False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [*STOPPING, signal.SIGCHLD])
        self._loop.post(self._reap)
        try:
            self._loop.run(self._next_deadline, self._tick, time.monotonic)
        finally:
            self._s3.end()
            self._sockets.close()
        if self._failure is not None:
            raise self._failure
        return self._code

    # The daemon's process.

    def _start(self) -> None:
        self._start_at = math.inf
        try:
            self._daemon = self._launched(self._releases[0])
        except OSError as error:
            log.error("the daemon cannot be started", extra={"error": error.strerror})
            self._start_later()

    def _launched(self, release: Release, replaces: bool = False) -> DaemonProcess:
        given = Given(msgspec.Raw(release.settings), os.getpid(), replaces, self._crash)
        pid, channel = self._launch(release.program, given, self._sockets.lock)
        return self._watched(pid, channel)

    def _watched(self, pid: int, channel: socket.socket) -> DaemonProcess:
        found = DaemonProcess(pid, channel)
        self._loop.watch(channel.fileno(), lambda: self._receive(found))
        return found

    def _receive(self, daemon: DaemonProcess) -> None:
        message, descriptors = receive_from_daemon.until_end(daemon.channel)
        if message is None:  # it has ended, or hangs in a disk without its sockets
            self._loop.unwatch(daemon.channel.fileno())
            daemon.channel.close()
            daemon.hung_at = min(daemon.hung_at, time.monotonic() + LINGER_S)
            return
        if (
            isinstance(message, HoldCopy) and descriptors
        ):  # else this process has as many files open as it may
            self._copies.hold(message.copy, descriptors.pop())
        for fd in descriptors:
            os.close(fd)
        self._handle(daemon, message)

    def _handle(self, daemon: DaemonProcess, message: FromDaemon) -> None:
        if isinstance(message, DropCopy):
            self._copies.drop(message.extent)
            self._send(daemon, CopyDropped())
        elif isinstance(message, GiveCopies):
            daemon.asks = True
            if daemon is self._daemon:
                self._give(daemon)
            elif self._daemon is not None:
                self._ask_to_leave(self._daemon)
            elif self._upgrade is not None:  # the old one has died, and is not started again
                self._start_at = math.inf
                self._become(self._upgrade)
        elif isinstance(message, DaemonServes):
            daemon.served_at, self._served, self._crash = time.monotonic(), True, ""
            del self._releases[1:]
            self._s3.serve(self._releases[0])
            self._sockets.end_announcement()
            self._answer(UpgradeAnswer())
        elif isinstance(message, StartFailed):
            daemon.failure = from_code(message.code, message.message)

    def _send(self, daemon: DaemonProcess, message: ToDaemon, *descriptors: int) -> None:
        with suppress(OSError):  # it has ended
            send(daemon.channel, message, descriptors)

    def _give(self, daemon: DaemonProcess) -> None:
        """Give a daemon the next copies."""
        if daemon.batches is None:
            daemon.batches = self._copies.batches()
        batch = next(daemon.batches, [])
        self._send(daemon, CopiesHeld(tuple(copy for copy, _ in batch)), *(fd for _, fd in batch))

    def _reap(self) -> None:
        """Reap all children that have ended, also processes that they left behind, where this is process 1."""
        with suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = found
                self._s3.reaped(pid, os.waitstatus_to_exitcode(status), self._stopping)
                for daemon in (self._daemon, self._upgrade.daemon if self._upgrade else None):
                    if daemon is not None and daemon.pid == pid:
                        self._read_last(daemon)
                        self._ended(daemon, os.waitstatus_to_exitcode(status))

    def _read_last(self, daemon: DaemonProcess) -> None:
        """Read what an ended daemon has sent: the reason why it did not start, and copies that it filled."""
        while daemon.channel.fileno() >= 0:
            self._receive(daemon)

    def _ended(self, daemon: DaemonProcess, code: int) -> None:
        if self._upgrade is not None and daemon is self._upgrade.daemon:
            self._give_up(daemon.failure or DaemonUnavailable(f"the new daemon ended (exit code {code})"))
            return
        self._daemon = None
        if self._upgrade is not None and self._upgrade.daemon.asks and not self._stopping:
            self._become(self._upgrade)
        elif self._stopping or (code >= 0 and not self._served) or (code == 0 and not daemon.leaves):
            # It could not start at all; or somebody stopped the daemon itself, where it ended in order.
            self._failure = None if self._served else daemon.failure
            if self._stopping and code in (-signal.SIGTERM, -signal.SIGKILL):
                code = 0  # it was starting, or hangs in a disk
            self._code = code if code >= 0 else 128 - code
            self._loop.stop()
        elif len(self._releases) > 1:
            failure = daemon.failure or DaemonUnavailable(f"the new daemon ended (exit code {code})")
            self._crash = f"another release does not start, and this one is run again: {failure}"
            log.error("%s", self._crash)
            del self._releases[0]
            self._answer(UpgradeAnswer.of(failure))
            self._start()
        else:
            self._crash = f"exit code {code}" if code >= 0 else f"signal {-code} ({signal.strsignal(-code)})"
            extra = {"why": self._crash, "extents": len(self._copies)}
            log.error("the daemon ended unexpectedly and is started again", extra=extra)
            if time.monotonic() - daemon.served_at >= CALM_S:
                self._pause_s = FIRST_PAUSE_S
            self._start_later()

    def _start_later(self) -> None:
        self._start_at = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, LAST_PAUSE_S)

    # Time.

    def _next_deadline(self) -> float:
        hung = self._daemon.hung_at if self._daemon else math.inf
        shed = math.inf if self._measured_by_daemon else self._shed_at
        return min(self._start_at, hung, shed, self._look_at, self._s3.start_at)

    @property
    def _measured_by_daemon(self) -> bool:
        return self._daemon is not None and self._daemon.asks

    def _tick(self) -> None:
        now = time.monotonic()
        if self._start_at <= now:
            self._start()
        self._s3.tick(now)
        if self._daemon is not None and self._daemon.hung_at <= now:
            log.warning("a daemon does not end and is given up", extra={"pid": self._daemon.pid})
            self._daemon.signal(signal.SIGKILL)
            self._ended(self._daemon, -signal.SIGKILL)
        if self._look_at <= now:
            self._look_at = now + LOOK_S
            self._look()
        if self._shed_at <= now and not self._measured_by_daemon:
            self._shed_at = now + SHED_S
            short = max(one.spare_bytes - one.free_bytes for one in memories())
            if short > 0 and (freed := self._copies.shed(short)):
                log.warning("memory is short: copies are dropped", extra={"bytes": freed})

    def _look(self) -> None:
        """Make the socket directory again where it was removed. The daemon makes its own sockets again there."""
        before = self._sockets.listener
        try:
            if self._sockets.made_again():
                log.warning(
                    "the socket directory was removed and is made again", extra={"socket": self._sockets.path}
                )
                self._loop.unwatch(before.fileno())
                before.close()
                self._loop.watch(self._sockets.listener.fileno(), self._connected)
            self._said = ""
        except (CacheError, OSError) as error:
            if str(error) != self._said:
                self._said = str(error)
                log.error("the socket directory was removed", extra={"error": self._said})

    # The end.

    def _hung_up(self) -> None:
        """End where SIGHUP says that the terminal has gone, whose descriptor is no terminal any more. Else have the daemon
        reload its settings."""
        if self._in_terminal and not os.isatty(0):
            self._stop()
        elif self._daemon is not None:
            self._daemon.signal(signal.SIGHUP)

    def _stop(self) -> None:
        """End the daemon, and then this process."""
        self._stopping = True
        if self._upgrade is not None:
            self._upgrade.daemon.signal(signal.SIGKILL)
        if self._daemon is None:
            self._loop.stop()
        else:
            self._daemon.signal(signal.SIGTERM)

    # Upgrades.

    def _connected(self) -> None:
        with suppress(OSError):
            connection, _ = self._sockets.listener.accept()
            if peer_process(connection)[1] not in (0, os.geteuid()):
                connection.close()
                return
            self._connections[connection.fileno()] = connection
            self._loop.watch(connection.fileno(), lambda: self._requested(connection))

    def _requested(self, connection: socket.socket) -> None:
        self._loop.unwatch(connection.fileno())
        del self._connections[connection.fileno()]
        request, _ = receive_upgrade.until_end(connection)
        if request is None:
            connection.close()
        elif request.protocol != PROTOCOL:
            why = f"the running service speaks protocol {PROTOCOL} of upgrades, not {request.protocol}; restart it"
            _reply(connection, UpgradeAnswer.of(InvalidInput(why)))
        elif (
            self._upgrade is not None or self._asked_by is not None or self._daemon is None or self._stopping
        ):
            why = "the service is starting, stopping or being upgraded; try again"
            _reply(connection, UpgradeAnswer.of(DaemonUnavailable(why)))
        else:
            try:
                daemon = self._launched(request.release, replaces=True)
            except OSError as error:
                why = f"{request.release.program.executable} cannot be started ({error.strerror})"
                _reply(connection, UpgradeAnswer.of(InvalidInput(why)))
            else:
                log.info("a new daemon prepares to serve", extra={"pid": daemon.pid})
                self._upgrade = _Upgrade(request.release, daemon, connection)

    def _ask_to_leave(self, daemon: DaemonProcess) -> None:
        """Tell the old daemon to leave, and readers to wait for the new one."""
        self._sockets.announce_upgrade()
        daemon.signal(LEAVE)
        daemon.leaves, daemon.hung_at = True, time.monotonic() + LEAVE_S

    def _give_up(self, error: CacheError) -> None:
        """Go on with the old daemon."""
        assert self._upgrade is not None, "no upgrade"
        log.error("the new daemon does not start; the old one goes on", extra={"error": str(error)})
        _reply(self._upgrade.connection, UpgradeAnswer.of(error))
        self._upgrade = None

    def _answer(self, answer: UpgradeAnswer) -> None:
        """Answer the request that led to this program, if it waits still."""
        asked_by, self._asked_by = self._asked_by, None
        if asked_by is not None:
            _reply(asked_by, answer)

    def _become(self, upgrade: _Upgrade) -> None:
        """Become the program of the new release. Where it cannot be run, go on as this one, with the new daemon."""
        state = ParentState(
            [upgrade.release, self._releases[0]],
            list(self._copies),
            self._sockets.lock,
            self._sockets.listener.fileno(),
            (upgrade.daemon.pid, upgrade.daemon.channel.fileno()),
            upgrade.connection.fileno(),
        )
        try:
            become(state, (*STOPPING, signal.SIGCHLD))
        except OSError as error:
            log.error("the parent cannot become the new release", extra={"error": error.strerror})
        self._daemon, self._asked_by, self._upgrade = upgrade.daemon, upgrade.connection, None
        self._releases = state.releases
        self._give(self._daemon)


def _reply(connection: socket.socket, answer: UpgradeAnswer) -> None:
    with suppress(OSError):  # it did not wait
        send(connection, answer)
    connection.close()
