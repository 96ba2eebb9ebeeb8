"""Processes that are forked from one which has imported all they need, and does nothing else: a new one begins within
milliseconds, not after 0.4 to 0.8 s of CPU, and shares its memory.

As multiprocessing's fork server, which leaves a directory behind when its parent is killed, and waits for each start.
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
from dataclasses import dataclass

from cachesvc.daemon.processes import jobs
from cachesvc.daemon.processes.spawn import channel_pair, spawn

log = logging.getLogger(__name__)
DEATH_S = 0.05
"""A killed process dies in a millisecond; the loop waits no longer for one that does not."""
ENVIRONMENT = {
    "OPENBLAS_NUM_THREADS": "1",
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 20),
}
"""numpy would start a thread for each core, and a process that forks must have one alone. Arrow's own allocator keeps
300 MiB after a row group of 64 MiB, and the C library keeps what is below a threshold that it raises by itself."""
CANNOT_FORK = os.EX_OSERR
"""The exit code of a process that the system does not let begin."""
_GONE = (BrokenPipeError, ConnectionResetError)
_PR_SET_PDEATHSIG = 1


@dataclass(slots=True, eq=False)
class Child:
    """A forked process, as the daemon knows it."""

    number: int
    pid: int = 0
    """0 until it has begun."""
    code: int | None = None
    """Its exit code, as subprocess has it; None until it has ended."""


class ForkServer:
    """The daemon's side, on the event loop's thread, to which `watch` and `unwatch` belong. The server alone reaps its
    children, so it is asked to kill them. They end with it, and it with the daemon, whatever ends that."""

    def __init__(
        self,
        module: str,
        given: str,
        inherits: tuple[int, ...],
        watch: Callable[[int, Callable[[], None]], None],
        unwatch: Callable[[int], None],
    ) -> None:
        self._module, self._given, self._inherits = module, given, inherits
        self._watch, self._unwatch = watch, unwatch
        self._server: tuple[subprocess.Popen[bytes], socket.socket] | None = None
        self._children: dict[int, Child] = {}
        self._orphans: list[int] = []
        self._number = 0

    def start(self) -> socket.socket:
        """Its channel; a new process's, where there is none. Raises OSError."""
        if self._server is None:
            self._server = spawn(self._module, self._given, {**os.environ, **ENVIRONMENT}, self._inherits)
            self._server[1].setblocking(False)
            self._watch(self._server[1].fileno(), self._heard)
        return self._server[1]

    def fork(self) -> tuple[Child, socket.socket]:
        """A process that is about to begin, and our end of its channel, which holds what is sent until then. One that
        cannot begin closes its end. Raises OSError where there is no server and none can be started."""
        self._reap_orphans()
        ours, theirs = channel_pair()
        child = Child(self._number)
        self._number += 1
        with theirs:
            try:
                try:
                    jobs.send(self.start(), jobs.Fork(child.number), (theirs.fileno(),))
                except _GONE:  # nobody has heard of its death yet
                    self._gone()
                    jobs.send(self.start(), jobs.Fork(child.number), (theirs.fileno(),))
            except OSError:
                ours.close()
                raise
        self._children[child.number] = child
        return child, ours

    def kill(self, child: Child) -> None:
        """SIGKILL, as soon as it has begun; no news for one that has ended."""
        if child.code is None and self._server is not None:
            with suppress(OSError):  # the server is dead, and so is the child
                jobs.send(self._server[1], jobs.Kill(child.number))

    def wait(self, child: Child, wait_s: float) -> int | None:
        """Its exit code; None where it is not dead by then: it hangs in the kernel, if it was killed."""
        deadline = time.monotonic() + wait_s
        while child.code is None and self._server and _readable(self._server[1], deadline):
            self._heard()
        return child.code

    def close(self, wait_s: float) -> None:
        """Kill all children, wait so long for their ends, and end the server."""
        deadline = time.monotonic() + wait_s
        begun = [child for child in self._children.values() if child.pid]
        for child in begun:
            self.kill(child)
        for child in begun:
            self.wait(child, deadline - time.monotonic())
        if self._server is not None:
            process = self._part_with()
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))

    def _heard(self) -> None:
        """Read one message, if there is one: `wait` may have read what the loop saw."""
        if self._server is None:
            return
        try:
            received = jobs.receive(self._server[1])
        except BlockingIOError:
            return
        except jobs.NONSENSE:
            received = None
        message = received[0] if received else None
        if isinstance(message, jobs.Forked):
            self._children[message.number].pid = message.pid
        elif isinstance(message, jobs.Ended):
            self._children.pop(message.number).code = message.code
        else:
            self._gone()

    def _gone(self) -> None:
        if self._server is None:
            return
        process = self._part_with()
        code: int | None = None
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(DEATH_S)
        log.warning("the process that fillers are forked from ended by itself", extra={"code": code})

    def _part_with(self) -> subprocess.Popen[bytes]:
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
        """Of a server that died: they are ours where nobody else adopts them, as in a container."""
        for pid in tuple(self._orphans):
            with suppress(ChildProcessError):  # they are not
                if os.waitpid(pid, os.WNOHANG) == (0, 0):
                    continue
            self._orphans.remove(pid)


def _readable(channel: socket.socket, deadline: float) -> bool:
    poll = select.poll()  # select(2) takes no descriptor beyond 1023
    poll.register(channel, select.POLLIN)
    return bool(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))


def serve_forks(channel: socket.socket, live: Callable[[socket.socket], None]) -> None:
    """The server's side, for a process of one thread: until the daemon closes the channel, fork a process for each
    channel of its own that comes, which is to `live` with it; tell of its beginning and its end."""
    gc.collect()
    gc.freeze()  # what no collection walks is not written, and stays shared
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    pids: dict[int, int] = {}
    with suppress(*_GONE):  # the daemon ended while it was told something
        while True:
            ready = select.select([channel.fileno(), woken], [], [])[0]
            if channel.fileno() in ready:
                received = jobs.receive(channel)
                if received is None:
                    return
                asked, descriptors = received
                if isinstance(asked, jobs.Fork):
                    try:
                        pids[asked.number] = _forked(descriptors, (channel.fileno(), woken, wake), live)
                    except OSError as error:
                        log.warning("a filler process cannot be forked", extra={"error": error.strerror})
                        jobs.send(channel, jobs.Ended(asked.number, CANNOT_FORK))
                    else:
                        jobs.send(channel, jobs.Forked(asked.number, pids[asked.number]))
                elif isinstance(asked, jobs.Kill) and asked.number in pids:
                    os.kill(pids[asked.number], signal.SIGKILL)
            if woken in ready:
                os.read(woken, 4096)
                for number, pid in tuple(pids.items()):
                    ended, status = os.waitpid(pid, os.WNOHANG)
                    if ended:
                        del pids[number]
                        jobs.send(channel, jobs.Ended(number, os.waitstatus_to_exitcode(status)))


def _forked(descriptors: list[int], servers: tuple[int, ...], live: Callable[[socket.socket], None]) -> int:
    """The pid of a child that lives with the channel that came. Raises OSError where none came, or none can be forked."""
    if not descriptors:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    (its_own,) = descriptors
    server = os.getpid()
    try:
        if pid := os.fork():
            return pid
    finally:
        if os.getpid() == server:
            os.close(its_own)
    code = 1
    try:  # it never returns into what the server does
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for fd in servers:
            os.close(fd)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == server:  # else it died before that
            live(socket.socket(fileno=its_own))
            code = 0
    except BaseException:
        log.exception("a filler process failed")
    finally:
        os._exit(code)
