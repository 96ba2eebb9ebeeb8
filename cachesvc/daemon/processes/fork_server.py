"""A fork server: a process that has imported everything its children need, and only forks.

A child starts within milliseconds instead of 0.4 to 0.8 s of CPU, and shares the server's memory. The fork server of
multiprocessing is not used: it leaves a directory behind when its parent is killed, and waits for each start.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import logging
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from cachesvc.daemon.processes.datagrams import RECEIVE_ERRORS, Receiver, send
from cachesvc.daemon.processes.spawn import channel_pair, spawn

log = logging.getLogger(__name__)
DEATH_S = 0.05
"""The longest that the event loop waits for a killed process, which normally dies within a millisecond."""
ENVIRONMENT = {
    "OPENBLAS_NUM_THREADS": "1",
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 20),
}
"""A process that forks must have a single thread, and numpy would start one for each core. Arrow's own allocator keeps
300 MiB after a row group of 64 MiB. The C library keeps freed blocks below a threshold that it raises by itself."""
CANNOT_FORK = os.EX_OSERR
"""The exit code of a child that the system refused to fork."""
_DISCONNECTED = (BrokenPipeError, ConnectionResetError)
_PR_SET_PDEATHSIG = 1


class ForkChild(msgspec.Struct, frozen=True, tag=True):
    """Tell the fork server to fork a process. Descriptors: the channel of that process."""

    number: int


class KillChild(msgspec.Struct, frozen=True, tag=True):
    """Tell the fork server to kill a process."""

    number: int


class ChildStarted(msgspec.Struct, frozen=True, tag=True):
    """The forked process runs."""

    number: int
    pid: int


class ChildEnded(msgspec.Struct, frozen=True, tag=True):
    """The forked process ended, or could not be forked. `code` is its exit code as in subprocess."""

    number: int
    code: int


_receive_request: Receiver[ForkChild | KillChild] = Receiver(ForkChild | KillChild)
_receive_news: Receiver[ChildStarted | ChildEnded] = Receiver(ChildStarted | ChildEnded)


@dataclass(slots=True, eq=False)
class Child:
    """A child of the fork server, as the daemon sees it."""

    number: int
    pid: int = 0
    """0 until the child has started."""
    code: int | None = None
    """The exit code, as subprocess has it; None until the child has ended."""


@dataclass(eq=False)
class ForkServer:
    """The daemon's side of the fork server; runs on the event loop's thread.

    Only the server reaps the children, so it also kills them. They die with the server, and the server with the daemon.
    """

    _module: str
    _given: object
    _inherits: tuple[int, ...]
    """As in `spawn`, all three."""
    _watch: Callable[[int, Callable[[], None]], None]
    _unwatch: Callable[[int], None]
    """The event loop's, both."""
    _server: tuple[subprocess.Popen[bytes], socket.socket] | None = None
    _children: dict[int, Child] = field(default_factory=dict)
    _orphans: list[int] = field(default_factory=list)
    _number: int = 0

    def start(self) -> socket.socket:
        """Return the server's channel, and start the server where none runs. Raises OSError."""
        if self._server is None:
            self._server = spawn(self._module, self._given, {**os.environ, **ENVIRONMENT}, self._inherits)
            self._server[1].setblocking(False)
            self._watch(self._server[1].fileno(), self._read_message)
        return self._server[1]

    def fork(self) -> tuple[Child, socket.socket]:
        """Request a child; return it and the daemon's end of its channel, which buffers messages until the child starts.

        The channel closes where the child cannot be forked. Raises OSError where no server runs or can be started.
        """
        self._reap_orphans()
        ours, theirs = channel_pair()
        child = Child(self._number)
        self._number += 1
        with theirs:
            try:
                try:
                    send(self.start(), ForkChild(child.number), (theirs.fileno(),))
                except _DISCONNECTED:  # the loop has not seen the server's death yet
                    self._server_died()
                    send(self.start(), ForkChild(child.number), (theirs.fileno(),))
            except OSError:
                ours.close()
                raise
        self._children[child.number] = child
        return child, ours

    def kill(self, child: Child) -> None:
        """Send SIGKILL as soon as the child has started; no effect on one that has ended."""
        if child.code is None and self._server is not None:
            with suppress(OSError):  # the server is dead, and its children too
                send(self._server[1], KillChild(child.number))

    def wait(self, child: Child, wait_s: float) -> int | None:
        """Return the exit code, or None where the child has not died in time. A killed one then hangs in the kernel."""
        deadline = time.monotonic() + wait_s
        while child.code is None and self._server and _readable(self._server[1], deadline):
            self._read_message()
        return child.code

    def close(self, wait_s: float) -> None:
        """Kill all children, wait at most `wait_s` seconds for their deaths, and end the server."""
        deadline = time.monotonic() + wait_s
        started = [child for child in self._children.values() if child.pid]
        for child in started:
            self.kill(child)
        for child in started:
            self.wait(child, deadline - time.monotonic())
        if self._server is not None:
            process = self._drop_server()
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))

    def _read_message(self) -> None:
        """Read one message, if there is one: `wait` may already have read the one that the loop saw."""
        if self._server is None:
            return
        try:
            received = _receive_news(self._server[1])
        except BlockingIOError:
            return
        except RECEIVE_ERRORS:
            received = None
        message = received[0] if received else None
        if isinstance(message, ChildStarted):
            self._children[message.number].pid = message.pid
        elif isinstance(message, ChildEnded):
            self._children.pop(message.number).code = message.code
        else:
            self._server_died()

    def _server_died(self) -> None:
        if self._server is None:
            return
        process = self._drop_server()
        code: int | None = None
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(DEATH_S)
        log.warning("the fork server of the fillers ended unexpectedly", extra={"code": code})

    def _drop_server(self) -> subprocess.Popen[bytes]:
        """Kill the server and count all children as dead."""
        assert self._server is not None
        process, channel = self._server
        self._server = None
        self._unwatch(channel.fileno())
        channel.close()
        process.kill()
        for child in self._children.values():
            child.code = -signal.SIGKILL
            self._orphans += [child.pid] if child.pid else []
        self._children.clear()
        return process

    def _reap_orphans(self) -> None:
        """Reap the children of a dead server. The daemon inherits them where it adopts orphans, as in a container."""
        for pid in tuple(self._orphans):
            with suppress(ChildProcessError):  # another process inherited them
                if os.waitpid(pid, os.WNOHANG) == (0, 0):
                    continue
            self._orphans.remove(pid)


def _readable(channel: socket.socket, deadline: float) -> bool:
    poll = select.poll()  # select(2) takes no descriptor beyond 1023
    poll.register(channel, select.POLLIN)
    return bool(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))


def serve_forks(channel: socket.socket, run_child: Callable[[socket.socket], None]) -> None:
    """Run the fork server in a process of one thread, until the daemon closes the channel.

    Each `ForkChild` brings the channel of a child, which calls `run_child` with it. The daemon is told of the child's
    start and end.
    """
    gc.collect()
    gc.freeze()  # objects that no collection walks are never written, so their pages stay shared
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    pids: dict[int, int] = {}
    with suppress(*_DISCONNECTED):  # the daemon ended during a send
        while True:
            ready = select.select([channel.fileno(), woken], [], [])[0]
            if channel.fileno() in ready:
                received = _receive_request(channel)
                if received is None:
                    return
                request, descriptors = received
                if isinstance(request, ForkChild):
                    own = (channel.fileno(), woken, wake)
                    try:
                        pids[request.number] = _fork_child(descriptors, own, run_child)
                    except OSError as error:
                        log.warning("a filler process cannot be forked", extra={"error": error.strerror})
                        send(channel, ChildEnded(request.number, CANNOT_FORK))
                    else:
                        send(channel, ChildStarted(request.number, pids[request.number]))
                elif isinstance(request, KillChild) and request.number in pids:
                    os.kill(pids[request.number], signal.SIGKILL)
            if woken in ready:
                os.read(woken, 4096)
                for number, pid in tuple(pids.items()):
                    ended, status = os.waitpid(pid, os.WNOHANG)
                    if ended:
                        del pids[number]
                        send(channel, ChildEnded(number, os.waitstatus_to_exitcode(status)))


def _fork_child(
    descriptors: list[int], of_server: tuple[int, ...], run_child: Callable[[socket.socket], None]
) -> int:
    """Fork a child, which gets the received channel and closes the server's descriptors; return its pid.

    Raises OSError where no channel was received, or the fork fails.
    """
    if not descriptors:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    (of_child,) = descriptors
    server = os.getpid()
    try:
        if pid := os.fork():
            return pid
    finally:
        if os.getpid() == server:
            os.close(of_child)
    code = 1
    try:  # the child never returns into the server's code
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for fd in of_server:
            os.close(fd)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == server:  # else the server died before prctl took effect
            run_child(socket.socket(fileno=of_child))
            code = 0
    except BaseException:
        log.exception("a filler process failed")
    finally:
        os._exit(code)
