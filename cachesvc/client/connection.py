"""One connection to a daemon's grants socket, on which threads ask at the same time.

Requests are numbered. Of the threads that wait for answers one reads the socket, for all of them; when it has its
own answers, another takes its place. The descriptor is closed by the last thread that has to do with it, so that
nobody reads from a number that is already another file's.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from cachesvc.client.control import no_answer
from cachesvc.core import wire
from cachesvc.core.errors import DaemonUnavailable, DeadlineExceeded
from cachesvc.core.wire import Message, Op
from cachesvc.system import datagrams

SEND_TIMEOUT_S = 30.0
"""A daemon that is stopped takes no messages; past this it counts as gone."""
SILENT_S = 30.0
"""A source that is slow, or a daemon that is stopped: whoever waits so long for an answer is told."""
MAX_NUMBER = (1 << 32) - 1
MAX_ASKED = 256
"""Requests without an answer, of all threads together: their answers fit the daemon's buffer
(`daemon/grants/server.py`), also when this process gets no core to read them. One who does not read is dropped."""
AT_ONCE = 128
"""Of one call: it leaves room for another's."""

_log = logging.getLogger("cachesvc")

Answer = tuple[Message, int | None]
"""What the daemon said, and the descriptor that came with it, which is the receiver's to close."""


def _number(answer: Answer) -> int:
    return answer[0].number


class _Call:
    """The answers that one thread waits for."""

    __slots__ = ("answers", "left")

    def __init__(self, left: int) -> None:
        self.answers: list[Answer] = []
        self.left = left


class Connection:
    """Lives until it breaks or is closed, and is never revived. Safe to share between threads; in a forked child
    `forget` it."""

    def __init__(self, path: str) -> None:
        """Raises DaemonUnavailable or NotAllowed when nobody answers at `path`."""
        self._path = path
        self.recalled: deque[Message] = deque()
        """Extents that the daemon asked for since somebody looked."""
        # Locked by itself: a `with` on a Condition runs Python code, in which an interrupt would leave it locked.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._asked: dict[int, _Call] = {}
        self._number = 0
        self._reading = False
        self._followers = 0
        self._users = 0
        self.over = False
        """It broke, or was closed."""
        self._channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        self._channel.settimeout(SEND_TIMEOUT_S)
        try:
            self._channel.connect(path)
        except OSError as error:
            self._channel.close()
            raise no_answer(path, error) from None
        self._channel.setblocking(False)
        self._readable = select.poll()
        self._readable.register(self._channel, select.POLLIN)

    @property
    def outstanding(self) -> int:
        """Requests that wait for their answers."""
        return len(self._asked)

    def ask(self, op: Op, values: Sequence[int], deadline: float) -> list[Answer]:
        """Send a request for each value and wait for the answers, in the same order. Raises DaemonUnavailable when the
        connection is gone, DeadlineExceeded at `deadline` (monotonic); then what had come is given back."""
        if len(values) <= AT_ONCE:
            return self._ask(op, values, deadline)
        answers: list[Answer] = []
        try:
            for start in range(0, len(values), AT_ONCE):
                answers += self._ask(op, values[start : start + AT_ONCE], deadline)
        except BaseException:
            give_back(self, answers)
            raise
        return answers

    def greet(self, message: Message, deadline: float) -> Message:
        """Send a greeting, before anything else, and wait for its answer. Raises as `ask`."""
        call = _Call(1)
        with self._lock:
            self._asked[0] = call
            self._users += 1
        try:
            with suppress(ConnectionError):  # turned away already: why, is to be read
                self._channel.send(wire.encode(*message))
            self._wait(call, deadline)
        finally:
            self._leave()
        return call.answers[0][0]

    def tell(self, messages: Sequence[Message], fd: int | None = None) -> None:
        """Send what has no answer, each with the descriptor, which stays the caller's. Raises DaemonUnavailable."""
        with self._lock:
            if self.over:
                raise self._gone()
            self._users += 1
        try:
            for message in messages:
                self._put(wire.encode(*message), fd)
        finally:
            self._leave()

    def listen(self) -> None:
        """Take in what the daemon has said unasked; whoever reads just now does that too."""
        with self._lock:
            if self.over or self._reading:
                return
            self._reading = True
            self._users += 1
        try:
            with suppress(DaemonUnavailable):
                while self._readable.poll(0):
                    self._take(self._receive(time.monotonic()), None)
        finally:
            self._end_reading()
            self._leave()

    def lives(self) -> bool:
        """Whether the daemon is still at the other end."""
        with self._lock:
            if self.over:
                return False
            gone = select.poll()
            gone.register(self._channel, select.POLLRDHUP)
            return not gone.poll(0)

    def close(self) -> None:
        """End it. Whoever waits for an answer raises DaemonUnavailable."""
        with self._lock:
            if self.over:
                return
            self.over = True
            with suppress(OSError):  # a peer that is gone
                self._channel.shutdown(socket.SHUT_RDWR)  # wakes who reads
            if not self._users:
                self._channel.close()
            self._changed.notify_all()

    def forget(self) -> None:
        """In a forked child: close the descriptor; no lock, for a thread of the parent may have held it."""
        self.over = True
        self._channel.close()

    # ---- inside

    def _gone(self) -> DaemonUnavailable:
        return DaemonUnavailable(f"the daemon at {self._path} went away; start it again: cachesvc serve")

    def _ask(self, op: Op, values: Sequence[int], deadline: float) -> list[Answer]:
        call = _Call(len(values))
        numbers = self._enter(call, deadline)
        try:
            for number, value in zip(numbers, values, strict=True):
                self._put(wire.encode(op, number, value))
            self._wait(call, deadline)
        except BaseException:
            self._withdraw(call, numbers)
            raise
        finally:
            self._leave()
        answers = call.answers
        if len(answers) > 1:
            answers.sort(key=_number)
        return answers

    def _enter(self, call: _Call, deadline: float) -> range:
        with self._lock:
            while self._asked and len(self._asked) + call.left > MAX_ASKED and not self.over:
                if not self._await(deadline):
                    raise self._late()
            if self.over:
                raise self._gone()
            if self._number + call.left > MAX_NUMBER:
                self._number = 0
            numbers = range(self._number + 1, self._number + 1 + call.left)
            self._number += call.left
            for number in numbers:
                self._asked[number] = call
            self._users += 1
            return numbers

    def _leave(self) -> None:
        with self._lock:
            self._users -= 1
            if self.over and not self._users:
                self._channel.close()

    def _put(self, data: bytes, fd: int | None = None) -> None:
        try:
            datagrams.send(self._channel, data, fd)
        except BlockingIOError:
            self._put_later(data, fd)
        except OSError:
            self.close()
            raise self._gone() from None

    def _put_later(self, data: bytes, fd: int | None) -> None:
        """Send when the daemon has read some of what it was sent."""
        deadline, room = time.monotonic() + SEND_TIMEOUT_S, select.poll()
        room.register(self._channel, select.POLLOUT)
        while room.poll(max(0.0, deadline - time.monotonic()) * 1000):
            try:
                datagrams.send(self._channel, data, fd)
                return
            except BlockingIOError:
                continue  # another thread was quicker
            except OSError:
                break
        self.close()
        raise self._gone()

    def _wait(self, call: _Call, deadline: float) -> None:
        while call.left:
            with self._lock:
                while call.left and self._reading and not self.over:
                    self._follow(call, deadline)
                if not call.left:
                    return
                if self.over:
                    raise self._gone()
                self._reading = True
            self._read_until(call, deadline)

    def _follow(self, call: _Call, deadline: float) -> None:
        """Wait for what another thread reads."""
        if not self._await(deadline) and call.left and self._reading:
            raise self._late()

    def _await(self, deadline: float) -> bool:
        """Wait for a change, with the lock held; False at the deadline."""
        self._followers += 1
        try:
            return self._changed.wait(deadline - time.monotonic())
        finally:
            self._followers -= 1

    def _read_until(self, call: _Call, deadline: float) -> None:
        """Read for everybody until this call is whole."""
        try:
            while call.left:
                self._take(self._receive(deadline), call)
        finally:
            self._end_reading()

    def _take(self, found: Answer, own: _Call | None) -> None:
        """Give an answer to whoever waits for it; `own` is the reading thread's."""
        answer, fd = found
        if answer.op is Op.RECALL:
            self.recalled.append(answer)
            return
        with self._lock:
            asker = self._asked.pop(answer.number, None)
            if asker is not None:
                asker.answers.append(found)
                asker.left -= 1
                if not asker.left and asker is not own:
                    self._changed.notify_all()
        if asker is None and fd is not None:  # nobody waits for it any more: nobody wants the lease
            os.close(fd)
            self._put(wire.encode(Op.RELEASE, 0, answer.value))

    def _end_reading(self) -> None:
        """Another thread may read from here on."""
        with self._lock:
            self._reading = False
            if self._followers:
                self._changed.notify_all()

    def _receive(self, deadline: float) -> Answer:
        if not self._heard(max(0.0, deadline - time.monotonic())):
            raise self._late()
        try:
            data, fd = datagrams.receive(self._channel, wire.MAX_MESSAGE_BYTES)
        except OSError:
            data, fd = b"", None
        try:
            return wire.decode(data), fd
        except ValueError:  # nothing: the other end is closed. Else no daemon of ours is there
            if fd is not None:
                os.close(fd)
            self.close()
            raise self._gone() from None

    def _heard(self, wait_s: float) -> bool:
        """Wait until there is something to read; who waits long says so."""
        ready = self._readable.poll(min(wait_s, SILENT_S) * 1000)
        if not ready and wait_s > SILENT_S:
            _log.warning(
                "the daemon at %s has granted nothing for %.0f s: waiting up to %.0f s more; see cachesvc status",
                self._path,
                SILENT_S,
                wait_s - SILENT_S,
            )
            ready = self._readable.poll((wait_s - SILENT_S) * 1000)
        return bool(ready)

    def _withdraw(self, call: _Call, numbers: Sequence[int]) -> None:
        """Nobody waits for these any more; what has come goes back."""
        with self._lock:
            for number in numbers:
                self._asked.pop(number, None)
            self._changed.notify_all()
        give_back(self, call.answers)

    def _late(self) -> DeadlineExceeded:
        return DeadlineExceeded(f"the daemon at {self._path} did not grant an extent in time")


def give_back(connection: Connection, answers: Sequence[Answer]) -> None:
    """Close the descriptors of answers that nobody will use, and end their leases."""
    leased = [(answer, fd) for answer, fd in answers if fd is not None]
    for _, fd in leased:
        os.close(fd)
    with suppress(DaemonUnavailable):  # its end ended the leases
        connection.tell([Message(Op.RELEASE, 0, answer.value) for answer, _ in leased])
