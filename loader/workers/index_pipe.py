"""What the trainer asks of its worker processes: a pipe each, which only the two of them use.

torch's own is a queue of `multiprocessing`. That has a thread in the trainer for each worker, which takes the
interpreter lock from the training step to pickle three numbers, and locks that Ctrl-C can leave taken. A message here
is smaller than what a pipe takes in one piece (PIPE_BUF): it is there whole or not at all, so there is nothing to lock.
"""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import struct
from collections import deque
from functools import partial
from itertools import chain, repeat
from multiprocessing.connection import Connection
from queue import Empty
from select import PIPE_BUF
from typing import Any

_HEAD = struct.Struct("!i")
"""Before each message, as `Connection.recv` has it."""


class IndexPipe:
    """The part of a queue that torch's iterator and its worker use. A spawned worker unpickles the end that reads.

    What a full pipe does not take waits here until the next `send`: a worker has hundreds of batches to make by then.
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
        """In the trainer: never waits."""
        body = pickle.dumps(request)
        assert _HEAD.size + len(body) <= PIPE_BUF, "keys of batches are small"
        self._unsent.append(_HEAD.pack(len(body)) + body)
        self.send()

    def send(self) -> None:
        """What the pipe takes of what was put."""
        while self._unsent:
            try:
                os.write(self._writer.fileno(), self._unsent[0])
            except BlockingIOError:
                return
            self._unsent.popleft()

    def get(self, timeout: float | None = None) -> Any:
        """In the worker. Raises `queue.Empty` after so many seconds."""
        if not self._reader.poll(timeout):
            raise Empty
        return self._reader.recv()

    def cancel_join_thread(self) -> None:
        """There is none."""

    def close(self) -> None:
        """In the trainer, once its workers have ended."""
        self._reader.close()
        self._writer.close()


def index_pipe_context(context: Any) -> Any:
    """A `multiprocessing` context (None: the default) for one iterator of torch's, whose first queue brings what all
    workers answer, and whose others each lead to one worker."""
    real: Any = context or multiprocessing.get_context()
    queues = chain((real.Queue,), repeat(partial(IndexPipe, real)))
    copied = copy.copy(real)
    copied.Queue = lambda: next(queues)()
    return copied
