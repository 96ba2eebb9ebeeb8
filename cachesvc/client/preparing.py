"""The connection of a process that prepares extents: it takes targets from the daemon, and reports what it wrote there."""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from dataclasses import dataclass

from cachesvc.client.control import no_answer
from cachesvc.config import GRANTS_SOCKET
from cachesvc.core import wire
from cachesvc.core.errors import CacheError, DaemonUnavailable, from_code
from cachesvc.core.limits import HELLO_S, SEND_S
from cachesvc.core.model import DatasetId
from cachesvc.core.wire import Message, Op
from cachesvc.system import datagrams

REPORT_S = 1.0
"""The longest time between two reports of progress. The daemon waits ten times as long."""


@dataclass(frozen=True, slots=True)
class Work:
    """An extent to prepare: its number in the dataset, and the descriptor of its target, which the receiver closes."""

    number: int
    extent: int
    size_bytes: int
    target: int


class PreparerConnection:
    """Offers a daemon to prepare extents of one dataset, one at a time, until it is closed. Used by one thread; another may
    close it. Raises DaemonUnavailable when the daemon is gone."""

    def __init__(self, directory: str, dataset: DatasetId, job: int) -> None:
        """Connect, and wait until the daemon counts this process as a preparer. Raises DaemonUnavailable, NotFound for a
        dataset that the daemon does not know."""
        path = f"{directory}/{GRANTS_SOCKET}"
        self._channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            self._channel.settimeout(HELLO_S)
            try:
                self._channel.connect(path)
            except OSError as error:
                raise no_answer(path, error) from None
            features = wire.KNOWS_HOLES | wire.PREPARES
            self._send(Message(Op.HELLO, wire.MAGIC, job, features, bytes.fromhex(dataset)))
            answer, _ = self._receive()
            if answer is None:
                raise DaemonUnavailable(f"the daemon at {path} does not answer; see its log")
            if answer.op is Op.FAILED:
                raise from_code(answer.size, answer.text)
        except BaseException:
            self._channel.close()
            raise
        self._digests = bytearray()
        self._first, self._reported = 0, 0.0

    def next(self, timeout_s: float) -> Work | None:
        """Return the next extent to prepare; None where none has come in time."""
        self._channel.settimeout(timeout_s)
        message, fd = self._receive()
        if message is None or message.op is not Op.PREPARE or fd is None:
            if fd is not None:
                os.close(fd)
            return None
        self._digests.clear()
        self._first, self._reported = 0, time.monotonic()
        return Work(message.number, message.value, message.size, fd)

    def progress(self, work: Work, digests: bytes, ended: bool = False) -> None:
        """Report the digests of the next blocks of an extent, of 8 bytes each, now or with later ones. Call it for each
        sample, also without a digest: silence is a stall."""
        self._digests += digests
        room = wire.DIGESTS_AT_ONCE * 8
        due = ended or time.monotonic() - self._reported >= REPORT_S
        while len(self._digests) >= room or (due and self._digests):
            self._report(work, bytes(self._digests[:room]))
            del self._digests[:room]
            due = ended
        if due:
            self._report(work, b"")

    def made(self, work: Work, error: CacheError | None = None, takes_bytes: int = 0) -> None:
        """End an extent, whose target is closed: it is complete, or cannot be prepared here now. `takes_bytes`: its size
        where it may take less than its target has."""
        if error is None:
            self.progress(work, b"", ended=True)
        code, text = (0, "") if error is None else (error.code, str(error))
        self._send(Message(Op.MADE, work.number, takes_bytes, code, text=text))

    def end(self) -> None:
        """End the offer, from another thread: the one that waits in `next` raises DaemonUnavailable."""
        with suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the offer, and close the connection."""
        self._channel.close()

    abandon = close

    def _report(self, work: Work, digests: bytes) -> None:
        self._send(Message(Op.MAKING, work.number, self._first, text=digests.hex()))
        self._first += len(digests) // 8
        self._reported = time.monotonic()

    def _send(self, message: Message) -> None:
        try:
            self._channel.settimeout(SEND_S)
            self._channel.send(wire.encode(*message))
        except OSError as error:
            raise DaemonUnavailable(f"the daemon is gone ({error.strerror or error})") from None

    def _receive(self) -> tuple[Message | None, int | None]:
        try:
            data, fd = datagrams.receive(self._channel, wire.MAX_MESSAGE_BYTES)
        except TimeoutError:
            return None, None
        except OSError as error:
            raise DaemonUnavailable(f"the daemon is gone ({error.strerror})") from None
        if not data:
            raise DaemonUnavailable("the daemon has ended the connection")
        return wire.decode(data), fd
