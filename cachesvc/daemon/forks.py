"""Processes that are forked from one which has imported all they need, and does nothing else: a new one begins within
milliseconds, not after 0.4 to 0.8 s of CPU, and shares its memory.

As multiprocessing's fork server, which leaves a directory behind when its parent is killed, and waits for each start.
"""

from __future__ import annotations

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

from cachesvc.daemon import jobs
from cachesvc.daemon.spawn import channel_pair, spawn

log = logging.getLogger(__name__)
DEATH_S = 0.05
"""A killed process dies in a millisecond; the loop waits no longer for one that does not."""
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}
"""numpy's would start one for each core, and nobody here multiplies matrices; what forks must have no other."""
STARTS = 2
"""A server that died may be found dead only when it is sent something."""


@dataclass(slots=True, eq=False)
class Child:
    """A forked process, as the daemon knows it."""

    number: int
    pid: int = 0
    """0 until it has begun."""
    code: int | None = None
    """Its exit code, as subprocess has it; None until it has ended."""
    _pidfd: int = -1
    _doomed: bool = False

    def kill(self) -> None:
        """SIGKILL, as soon as it has begun; no news for one that has ended."""
        self._doomed = True
        if self._pidfd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def began(self, pid: int, pidfd: int) -> None:
        """It runs; the pidfd is its own now."""
        self.pid, self._pidfd = pid, pidfd
        if self._doomed:
            self.kill()

    def ended(self, code: int) -> None:
        """It is dead, or never begins."""
        self.code = code
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    def await_end(self, deadline: float) -> None:
        """Until it is dead, whoever reaps it."""
        if self._pidfd >= 0:
            _readable(self._pidfd, deadline)


class ForkServer:
    """The daemon's side, on the event loop's thread, to which `watch` and `unwatch` belong; nothing here waits for the
    server. Children end with it, however it ends: each by its own channel, and by SIGKILL."""

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
        self._number = 0

    def start(self) -> socket.socket:
        """Its channel; a new process's, where there is none. Raises OSError."""
        if self._server is None:
            self._server = spawn(self._module, self._given, {**os.environ, **ONE_THREAD}, self._inherits)
            self._watch(self._server[1].fileno(), self._read)
        return self._server[1]

    def fork(self) -> tuple[Child, socket.socket]:
        """A process that is about to begin, and our end of its channel, which holds what is sent until then. One that
        cannot be forked closes its end. Raises OSError where there is no server and none can be started."""
        ours, theirs = channel_pair()
        child = Child(self._number)
        self._number += 1
        with theirs:
            for start in range(STARTS):
                try:
                    jobs.send(self.start(), jobs.Fork(child.number), (theirs.fileno(),))
                    break
                except OSError:
                    self._gone()
                    if start == STARTS - 1:
                        ours.close()
                        raise
        self._children[child.number] = child
        return child, ours

    def wait(self, child: Child, wait_s: float) -> int | None:
        """Its exit code; None where it is not dead by then: it hangs in the kernel, if it was killed."""
        deadline = time.monotonic() + wait_s
        while child.code is None and self._server and _readable(self._server[1].fileno(), deadline):
            self._read()
        return child.code

    def close(self, wait_s: float) -> None:
        """Kill the server and all children, and wait so long for their end."""
        children = tuple(self._children.values())
        if self._server is not None:
            process, channel = self._server
            self._server = None
            self._unwatch(channel.fileno())
            channel.close()
            process.kill()
        deadline = time.monotonic() + wait_s
        for child in children:
            child.kill()
        for child in children:
            child.await_end(deadline)
            child.ended(-signal.SIGKILL)
        self._children.clear()

    def _read(self) -> None:
        assert self._server is not None
        try:
            received = jobs.receive(self._server[1])
        except jobs.NONSENSE:
            received = None
        message, descriptors = received or (None, [])
        if isinstance(message, jobs.Forked):
            self._children[message.number].began(message.pid, *descriptors)
        elif isinstance(message, jobs.Ended):
            self._children.pop(message.number).ended(message.code)
        else:
            self._gone()

    def _gone(self) -> None:
        if self._server is None:
            return
        process, channel = self._server
        self._server = None
        self._unwatch(channel.fileno())
        channel.close()
        process.kill()
        code: int | None = None
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(DEATH_S)
        log.warning("the process that fillers are forked from ended by itself", extra={"code": code})
        for child in self._children.values():
            child.kill()
            child.ended(-signal.SIGKILL)
        self._children.clear()


def _readable(fd: int, deadline: float) -> bool:
    poll = select.poll()  # select(2) takes no descriptor beyond 1023
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))


def serve_forks(channel: socket.socket, live: Callable[[socket.socket], None]) -> None:
    """The server's side, for a process of one thread: until the daemon closes the channel, fork a process for each
    channel of its own that comes, which is to `live` with it; tell of its beginning and its end."""
    gc.collect()
    gc.freeze()  # what no collection walks is not written, and stays shared
    numbers: dict[int, tuple[int, int]] = {}
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    with suppress(BrokenPipeError, ConnectionResetError):  # the daemon ended while it was told something
        while True:
            for fd, _ in poll.poll():
                if fd in numbers:
                    number, pid = numbers.pop(fd)
                    poll.unregister(fd)
                    os.close(fd)
                    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    jobs.send(channel, jobs.Ended(number, code))
                    continue
                if (received := jobs.receive(channel)) is None:
                    return
                asked, (theirs,) = received
                assert isinstance(asked, jobs.Fork), "the daemon sends jobs to those that are forked"
                with socket.socket(fileno=theirs) as its_own:
                    try:
                        pid = os.fork()
                    except OSError as error:
                        log.warning("a filler process cannot be forked", extra={"error": error.strerror})
                        jobs.send(channel, jobs.Ended(asked.number, os.EX_OSERR))
                        continue
                    if pid == 0:
                        channel.close()
                        for other in numbers:
                            os.close(other)
                        _live(its_own, live)
                pidfd = os.pidfd_open(pid)
                numbers[pidfd] = asked.number, pid
                poll.register(pidfd, select.POLLIN)
                jobs.send(channel, jobs.Forked(asked.number, pid), (pidfd,))


def _live(channel: socket.socket, live: Callable[[socket.socket], None]) -> None:
    """The child's whole life: it never returns into the server's."""
    code = 1
    try:
        live(channel)
        code = 0
    except BaseException:
        log.exception("a filler process failed")
    finally:
        os._exit(code)
