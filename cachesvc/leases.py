"""The reader's end of the grants socket: ask for extents, get read-only descriptors, give leases back."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from cachesvc.client import no_answer
from cachesvc.config import GRANTS_SOCKET
from cachesvc.core import wire
from cachesvc.core.errors import DaemonUnavailable, DeadlineExceeded, from_code
from cachesvc.core.model import DatasetId
from cachesvc.core.stalls import StallReport
from cachesvc.core.wire import Message, Op
from cachesvc.grants import Granted, Refused

SEND_TIMEOUT_S = 30.0
"""A daemon that is stopped takes no messages; past this it counts as gone."""
MAX_NUMBER = 1 << 32
HELLO_TIMEOUT_S = 30.0
"""A restarted daemon loads the catalog before it welcomes anyone."""

KNOCK_EVERY_S = 1.0
"""A connect that fails costs 20 us; a restarted daemon should soon know what is held."""


class DaemonGrants:
    """One connection to a daemon for one dataset. Made anew by the first call after it broke, and then the
    extents still leased are held against the new daemon's budget. Safe to share between threads; never
    across a fork."""

    def __init__(
        self,
        directory: str,
        dataset: DatasetId,
        connected: Callable[[int], None] | None = None,
        job: int = 0,
    ) -> None:
        """`connected(reader token)` is called after every (re)connection: the place to submit a plan. Readers of
        one `job` have one share of the fills; 0: this connection has a share of its own."""
        self._path = f"{directory}/{GRANTS_SOCKET}"
        self._dataset = dataset
        self._connected = connected
        self._job = job
        self._lock = threading.RLock()
        self._channel: socket.socket | None = None
        self._leases: dict[int, int] = {}
        self._origins: dict[int, str] = {}
        self._number = 0
        self._knock_at = 0.0
        self.token = 0

    def connect(self) -> bool:
        """Be connected to a daemon that lives; True when this made a new connection. Raises DaemonUnavailable."""
        with self._lock:
            if self._channel is not None:
                gone = select.poll()
                gone.register(self._channel, select.POLLRDHUP)
                if not gone.poll(0):
                    return False
                self._disconnect()
            self._connect()
            return True

    def acquire(self, extents: Sequence[int], timeout_s: float) -> list[Granted | Refused]:
        """One answer for each extent, in the order asked. Every Granted is a lease until `release`.

        Raises DaemonUnavailable when the connection is gone or cannot be made, DeadlineExceeded after
        `timeout_s`, and the typed error of a fill that failed.
        """
        with self._lock:
            channel = self._connect()
            asked: dict[int, int] = {}
            for extent in extents:
                self._number = (self._number + 1) % MAX_NUMBER
                asked[self._number] = extent
                self._send(channel, Message(Op.GET, self._number, extent))
            answers: dict[int, Granted | Refused] = {}
            try:
                self._collect(channel, asked, answers, time.monotonic() + timeout_s)
            except BaseException:
                self._give_back(answers)
                raise
            return [answers[extent] for extent in extents]

    def release(self, extents: Sequence[int]) -> None:
        """Give leases back, after unmapping. Without a daemon there is nothing to give back."""
        with self._lock:
            for extent in extents:
                count = self._leases.pop(extent, 0)
                if count > 1:
                    self._leases[extent] = count - 1
                else:
                    self._origins.pop(extent, None)
                if count and self._channel is not None:
                    self._try_send(Message(Op.RELEASE, 0, extent))

    def passed(self, step: int) -> None:
        """This reader's plan has moved on: everything before `step` has been consumed. A daemon that was started
        again learns here of the plan and of what is still held, though nothing more is asked of it."""
        with self._lock:
            if self._channel is None and self.token and time.monotonic() >= self._knock_at:
                self._knock_at = time.monotonic() + KNOCK_EVERY_S
                with suppress(DaemonUnavailable):
                    self._connect()
            if self._channel is not None:
                self._try_send(Message(Op.PASSED, 0, step))

    def suspect(self, extents: Sequence[int]) -> None:
        """What was granted of these does not match its checksums: the daemon is to check it before it grants it
        again. To be said before their release."""
        with self._lock:
            for extent in extents:
                self._try_send(Message(Op.SUSPECT, 0, extent))

    def waited(self, report: StallReport) -> None:
        """What this rank's steps waited for; a daemon that is gone need not know."""
        with self._lock:
            self._try_send(Message(Op.WAITED, text=report.encode()))

    def catalog(self) -> int:
        """A descriptor of the dataset's catalog (sealed, read-only); the caller closes it."""
        with self._lock:
            channel = self._connect()
            self._send(channel, Message(Op.CATALOG))
            deadline = time.monotonic() + HELLO_TIMEOUT_S
            while True:
                answer, fd = self._receive(channel, deadline)
                if answer.op is Op.CATALOG and fd is not None:
                    return fd
                self._decline(answer, fd)

    def close(self) -> None:
        """End every lease and the claim on the dataset."""
        with self._lock:
            self._leases.clear()
            self._origins.clear()
            self._disconnect()

    def _connect(self) -> socket.socket:
        if self._channel is not None:
            return self._channel
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        channel.settimeout(SEND_TIMEOUT_S)
        try:
            channel.connect(self._path)
        except OSError as error:
            channel.close()
            raise no_answer(self._path, error) from None
        try:
            self._send(channel, Message(Op.HELLO, wire.MAGIC, self._job, digest=bytes.fromhex(self._dataset)))
            answer, _ = self._receive(channel, time.monotonic() + HELLO_TIMEOUT_S)
            if answer.op is Op.FAILED:
                raise from_code(answer.size, answer.text)
        except BaseException:
            channel.close()
            raise
        self._channel = channel
        self.token = answer.size
        for extent in self._leases:
            self._send(channel, Message(Op.HOLD, 0, extent, text=self._origins.get(extent, "")))
        self._leases = dict.fromkeys(self._leases, 1)
        try:
            if self._connected is not None:
                self._connected(self.token)
        except BaseException:
            self._disconnect()  # the next call connects again, and then the plan is not forgotten
            raise
        return channel

    def _disconnect(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _collect(
        self,
        channel: socket.socket,
        asked: dict[int, int],
        answers: dict[int, Granted | Refused],
        deadline: float,
    ) -> None:
        """Fill `answers`, by extent. Raises when one failed, after the others have come."""
        failure: Exception | None = None
        while asked:
            answer, fd = self._receive(channel, deadline)
            extent = asked.pop(answer.number, None)
            if extent is None:
                self._decline(answer, fd)
            elif answer.op is Op.GRANT and fd is not None:
                tier, _, stay = answer.text.partition(" ")
                origin = tier.rstrip("0123456789")
                self._leases[extent] = self._leases.get(extent, 0) + 1
                self._origins[extent] = origin
                brief, once = stay != "kept", stay == "once"
                answers[extent] = Granted(extent, fd, 0, answer.size, origin, brief, once)
            elif answer.op is Op.REFUSED:
                answers[extent] = Refused(extent)
            else:
                failure = from_code(answer.size, answer.text)
        if failure is not None:
            raise failure

    def _decline(self, late: Message, fd: int | None) -> None:
        """An answer to a request that ran into its deadline: nobody wants the lease any more."""
        if fd is not None:
            os.close(fd)
            self._try_send(Message(Op.RELEASE, 0, late.value))

    def _give_back(self, answers: dict[int, Granted | Refused]) -> None:
        given = [answer for answer in answers.values() if isinstance(answer, Granted)]
        for answer in given:
            os.close(answer.fd)
        self.release([answer.extent for answer in given])

    def _receive(self, channel: socket.socket, deadline: float) -> tuple[Message, int | None]:
        poll = select.poll()
        poll.register(channel, select.POLLIN)
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise DeadlineExceeded(f"the daemon at {self._path} did not grant an extent in time")
        try:
            data, fds, _, _ = socket.recv_fds(channel, wire.MAX_MESSAGE_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
        except OSError:
            data, fds = b"", []
        if not data:
            self._disconnect()
            raise DaemonUnavailable(f"the daemon at {self._path} went away; start it again: cachesvc serve")
        return wire.decode(data), fds[0] if fds else None

    def _send(self, channel: socket.socket, message: Message) -> None:
        try:
            channel.send(wire.encode(message))
        except OSError:
            self._disconnect()
            raise DaemonUnavailable(
                f"the daemon at {self._path} went away; start it again: cachesvc serve"
            ) from None

    def _try_send(self, message: Message) -> None:
        """Send what a daemon that is gone need not hear."""
        if self._channel is None:
            return
        try:
            self._channel.send(wire.encode(message))
        except OSError:
            self._disconnect()
