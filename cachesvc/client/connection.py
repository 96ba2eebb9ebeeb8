"""One connection to a daemon's grants socket, which threads share for concurrent requests.

Requests are numbered. Of the threads that wait for answers one reads the socket, for all of them; when it has its own
answers, another takes over. The last thread that uses the descriptor closes it, so that no thread reads from a number
that belongs to another file by then.
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
from cachesvc.core.limits import SEND_S
from cachesvc.core.wire import Message, Op
from cachesvc.system import datagrams

WARN_AFTER_S = 30.0
"""A wait this long for an answer (a slow source, a stopped daemon) is logged."""
MAX_NUMBER = (1 << 32) - 1
MAX_OUTSTANDING = 256
"""Requests without an answer, of all threads together. Their answers fit the daemon's buffer
(`daemon/grants/server.py`), also while this process gets no core to read them; it drops readers that overflow it."""
MAX_GROUP = 128
"""Requests of one call that are outstanding at once: it leaves room for another call's."""

_log = logging.getLogger("cachesvc")

Answer = tuple[Message, int | None]
"""A message of the daemon and the descriptor that came with it, which the receiver closes."""


def _number(answer: Answer) -> int:
    return answer[0].number


class _Call:
    """The answers that one thread waits for."""

    __slots__ = ("answers", "left")

    def __init__(self, left: int) -> None:
        self.answers: list[Answer] = []
        self.left = left


class Connection:
    """Lasts until it breaks or is closed, and is never revived. Safe to share between threads; in a forked child
    `abandon` it."""

    def __init__(self, path: str) -> None:
        """Raises DaemonUnavailable or NotAllowed when no daemon accepts at `path`."""
        self._path = path
        self.recalled: deque[Message] = deque()
        """Recalls of extents that `DaemonGrants.recalled` has not read yet."""
        # Lock this, not the Condition: its `with` runs Python code, in which an interrupt would leave it locked.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._calls: dict[int, _Call] = {}
        """By the number of each outstanding request."""
        self._number = 0
        self._reading = False
        self._followers = 0
        self._users = 0
        self.ended = False
        """It broke, or was closed."""
        self._channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        self._channel.settimeout(SEND_S)
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
        return len(self._calls)

    def request(self, op: Op, values: Sequence[int], deadline: float) -> list[Answer]:
        """Send a request for each value and wait for the answers; returns them in the same order. Raises
        DaemonUnavailable when the connection breaks, DeadlineExceeded at `deadline` (monotonic); answers that have come
        are released then."""
        if len(values) <= MAX_GROUP:
            return self._request_group(op, values, deadline)
        answers: list[Answer] = []
        try:
            for start in range(0, len(values), MAX_GROUP):
                answers += self._request_group(op, values[start : start + MAX_GROUP], deadline)
        except BaseException:
            release_answers(self, answers)
            raise
        return answers

    def greet(self, message: Message, deadline: float) -> Message:
        """Send a greeting, before anything else, and wait for its answer. Raises as `request`."""
        call = _Call(1)
        with self._lock:
            self._calls[0] = call
            self._users += 1
        try:
            with suppress(ConnectionError):  # refused already: the reason is in the answer
                self._channel.send(wire.encode(*message))
            self._wait(call, deadline)
        finally:
            self._leave()
        return call.answers[0][0]

    def send(self, messages: Sequence[Message], fd: int | None = None) -> None:
        """Send messages that have no answer, each with the descriptor, which stays the caller's. Raises
        DaemonUnavailable."""
        with self._lock:
            if self.ended:
                raise self._gone()
            self._users += 1
        try:
            for message in messages:
                self._put(wire.encode(*message), fd)
        finally:
            self._leave()

    def read_pending(self) -> None:
        """Read the messages that have come, recalls among them. A thread that waits for answers does that, too."""
        with self._lock:
            if self.ended or self._reading:
                return
            self._reading = True
            self._users += 1
        try:
            with suppress(DaemonUnavailable):
                while self._readable.poll(0):
                    self._dispatch(self._receive(time.monotonic()), None)
        finally:
            self._end_reading()
            self._leave()

    def is_alive(self) -> bool:
        """True while the daemon has its end open."""
        with self._lock:
            if self.ended:
                return False
            gone = select.poll()
            gone.register(self._channel, select.POLLRDHUP)
            return not gone.poll(0)

    def close(self) -> None:
        """End the connection. Threads that wait for answers raise DaemonUnavailable."""
        with self._lock:
            if self.ended:
                return
            self.ended = True
            with suppress(OSError):  # a peer that is gone
                self._channel.shutdown(socket.SHUT_RDWR)  # wakes the reading thread
            if not self._users:
                self._channel.close()
            self._changed.notify_all()

    def abandon(self) -> None:
        """Close the descriptor in a forked child, without the lock, which a thread of the parent may have held."""
        self.ended = True
        self._channel.close()

    # ---- inside

    def _gone(self) -> DaemonUnavailable:
        return DaemonUnavailable(f"the daemon at {self._path} went away; start it again: cachesvc serve")

    def _request_group(self, op: Op, values: Sequence[int], deadline: float) -> list[Answer]:
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
        """Number the requests of a call, once they do not exceed MAX_OUTSTANDING."""
        with self._lock:
            while self._calls and len(self._calls) + call.left > MAX_OUTSTANDING and not self.ended:
                if not self._await_change(deadline):
                    raise self._timed_out()
            if self.ended:
                raise self._gone()
            if self._number + call.left > MAX_NUMBER:
                self._number = 0
            numbers = range(self._number + 1, self._number + 1 + call.left)
            self._number += call.left
            for number in numbers:
                self._calls[number] = call
            self._users += 1
            return numbers

    def _leave(self) -> None:
        with self._lock:
            self._users -= 1
            if self.ended and not self._users:
                self._channel.close()

    def _put(self, data: bytes, fd: int | None = None) -> None:
        try:
            datagrams.send(self._channel, data, fd)
        except BlockingIOError:
            self._put_when_writable(data, fd)
        except OSError:
            self.close()
            raise self._gone() from None

    def _put_when_writable(self, data: bytes, fd: int | None) -> None:
        """Send once the daemon has read some of the messages before."""
        deadline, writable = time.monotonic() + SEND_S, select.poll()
        writable.register(self._channel, select.POLLOUT)
        while writable.poll(max(0.0, deadline - time.monotonic()) * 1000):
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
                while call.left and self._reading and not self.ended:
                    self._follow(call, deadline)
                if not call.left:
                    return
                if self.ended:
                    raise self._gone()
                self._reading = True
            self._read_until(call, deadline)

    def _follow(self, call: _Call, deadline: float) -> None:
        """Wait for answers that another thread reads."""
        if not self._await_change(deadline) and call.left and self._reading:
            raise self._timed_out()

    def _await_change(self, deadline: float) -> bool:
        """Wait for a change, with the lock held; False at the deadline."""
        self._followers += 1
        try:
            return self._changed.wait(deadline - time.monotonic())
        finally:
            self._followers -= 1

    def _read_until(self, call: _Call, deadline: float) -> None:
        """Read for all threads until this call is complete."""
        try:
            while call.left:
                self._dispatch(self._receive(deadline), call)
        finally:
            self._end_reading()

    def _dispatch(self, found: Answer, own: _Call | None) -> None:
        """Hand an answer to the call that waits for it; `own` is the reading thread's."""
        answer, fd = found
        if answer.op is Op.RECALL:
            self.recalled.append(answer)
            return
        with self._lock:
            call = self._calls.pop(answer.number, None)
            if call is not None:
                call.answers.append(found)
                call.left -= 1
                if not call.left and call is not own:
                    self._changed.notify_all()
        if call is None and fd is not None:  # its call was withdrawn: end the lease
            os.close(fd)
            self._put(wire.encode(Op.RELEASE, 0, answer.value))

    def _end_reading(self) -> None:
        """Let another thread read from here on."""
        with self._lock:
            self._reading = False
            if self._followers:
                self._changed.notify_all()

    def _receive(self, deadline: float) -> Answer:
        if not self._await_readable(max(0.0, deadline - time.monotonic())):
            raise self._timed_out()
        try:
            data, fd = datagrams.receive(self._channel, wire.MAX_MESSAGE_BYTES)
        except OSError:
            data, fd = b"", None
        try:
            return wire.decode(data), fd
        except ValueError:  # no bytes: the other end is closed; else the peer is not a daemon of ours
            if fd is not None:
                os.close(fd)
            self.close()
            raise self._gone() from None

    def _await_readable(self, wait_s: float) -> bool:
        """Wait until there is something to read; a long wait is logged."""
        ready = self._readable.poll(min(wait_s, WARN_AFTER_S) * 1000)
        if not ready and wait_s > WARN_AFTER_S:
            _log.warning(
                "the daemon at %s has granted nothing for %.0f s: waiting up to %.0f s more; see cachesvc status",
                self._path,
                WARN_AFTER_S,
                wait_s - WARN_AFTER_S,
            )
            ready = self._readable.poll((wait_s - WARN_AFTER_S) * 1000)
        return bool(ready)

    def _withdraw(self, call: _Call, numbers: Sequence[int]) -> None:
        """Forget outstanding requests, and release the answers that have come."""
        with self._lock:
            for number in numbers:
                self._calls.pop(number, None)
            self._changed.notify_all()
        release_answers(self, call.answers)

    def _timed_out(self) -> DeadlineExceeded:
        return DeadlineExceeded(f"the daemon at {self._path} did not grant an extent in time")


def release_answers(connection: Connection, answers: Sequence[Answer]) -> None:
    """Close the descriptors of unused answers, and end their leases."""
    leased = [(answer, fd) for answer, fd in answers if fd is not None]
    for _, fd in leased:
        os.close(fd)
    with suppress(DaemonUnavailable):  # its end ended the leases
        connection.send([Message(Op.RELEASE, 0, answer.value) for answer, _ in leased])
