"""Sends batch keys from the trainer to its worker processes, over one pipe per worker.

torch uses a `multiprocessing` queue. Its feeder thread in the trainer takes the interpreter lock from the training
step to pickle three numbers, and Ctrl-C can leave its locks taken. A message here is smaller than PIPE_BUF, so a
write is atomic and needs no lock.
"""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import struct
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import chain, repeat
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from queue import Empty
from select import PIPE_BUF
from typing import Any

FORK_SERVER_PRELOAD = "cachesvc.system.fork_server_preload"
_HEAD = struct.Struct("!i")
"""The length before each message, as `Connection.recv` expects it."""


class IndexPipe:
    """The queue methods that torch's iterator and worker use. A spawned worker unpickles the reading end.

    Messages that do not fit into a full pipe wait for the next `send`; the worker then has hundreds of batches to
    make.
    """

    def __init__(self, context: Any) -> None:
        self._reader: Connection
        self._writer: Connection
        self._reader, self._writer = context.Pipe(duplex=False)
        os.set_blocking(self._writer.fileno(), False)
        self._unsent: deque[bytes] = deque()

    def __getstate__(self) -> Connection:
        return self._reader

    def __setstate__(self, reader: Connection) -> None:
        self._reader = reader

    def put(self, request: Any) -> None:
        """Queue a request, in the trainer. Never blocks."""
        body = pickle.dumps(request)
        assert _HEAD.size + len(body) <= PIPE_BUF, "keys of batches are small"
        self._unsent.append(_HEAD.pack(len(body)) + body)
        self.send()

    def send(self) -> None:
        """Write queued requests until the pipe is full."""
        while self._unsent:
            try:
                os.write(self._writer.fileno(), self._unsent[0])
            except BlockingIOError:
                return
            self._unsent.popleft()

    def get(self, timeout: float | None = None) -> Any:
        """Read a request, in the worker. Raises `queue.Empty` after the timeout in seconds."""
        if not self._reader.poll(timeout):
            raise Empty
        return self._reader.recv()

    def cancel_join_thread(self) -> None:
        """Do nothing: there is no thread."""

    def close(self) -> None:
        """Close both ends, in the trainer, after its workers have ended."""
        self._reader.close()
        self._writer.close()


def index_pipe_context(context: Any) -> Any:
    """Return a `multiprocessing` context for one torch iterator. The first queue it creates is real and carries the
    workers' results; each later one is an index pipe to one worker. Its processes are workers, which SIGTERM does not end.
    `context` None is the default context."""
    real: Any = context or multiprocessing.get_context()
    queues = chain((real.Queue,), repeat(partial(IndexPipe, real)))
    copied = copy.copy(real)
    copied.Queue = lambda: next(queues)()
    copied.Process = partial(_worker, real.Process)
    if real.get_start_method() == "forkserver":
        _start_fork_server(real)
    return copied


def _worker(kind: Any, **given: Any) -> Any:
    """Return a process that `terminate` kills. torch calls it for a worker that hangs. The interpreter calls it at its exit
    and then waits for the process."""
    process = kind(**given)
    process._Popen = partial(_killable, kind._Popen)
    return process


def _killable(start: Callable[[Any], Any], process: Any) -> Any:
    started = start(process)
    started.terminate = partial(type(started).kill, weakref.proxy(started))
    return started


def _start_fork_server(context: Any) -> None:
    """Start multiprocessing's fork server, unless it runs, so that it outlives what its workers outlive."""
    preloaded = forkserver._forkserver._preload_modules  # type: ignore[attr-defined]
    if FORK_SERVER_PRELOAD not in preloaded:
        context.set_forkserver_preload([*preloaded, FORK_SERVER_PRELOAD])
    forkserver.ensure_running()
