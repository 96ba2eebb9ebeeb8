"""Reads parts of objects from the daemon without a dataset, on an event loop of asyncio.

The caller states an object's version, and gets a descriptor of the extent that holds the bytes. The daemon fetches what it
does not have. A lease ends with `release`, or with the connection.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from cachesvc.config import GRANTS_SOCKET
from cachesvc.core import wire
from cachesvc.core.errors import CacheError, DaemonUnavailable, DeadlineExceeded, from_code
from cachesvc.core.limits import HELLO_S, PROBE_FIRST_S, ROOM_PAUSE_S
from cachesvc.core.model import ObjectVersion
from cachesvc.core.wire import Message, Op
from cachesvc.system import datagrams

MAX_OUTSTANDING = 256
"""Requests without an answer: their answers fit the daemon's buffer. Others wait here."""


@dataclass(frozen=True, slots=True)
class LeasedPart:
    """Bytes [begin, end) of an object, at offset `at` of `fd`. `mark` identifies the lease."""

    fd: int
    begin: int
    end: int
    at: int
    mark: tuple[int, bytes]


class ObjectReads:
    """One connection to the daemon, which is made again when it breaks. For one event loop."""

    def __init__(self, directory: str) -> None:
        """`directory` holds the daemon's sockets."""
        self._path = f"{directory}/{GRANTS_SOCKET}"
        self._link: _Link | None = None
        self._connecting = asyncio.Lock()
        self._room = asyncio.Semaphore(MAX_OUTSTANDING)

    async def lease(
        self, version: ObjectVersion, offset: int, timeout_s: float, room_s: float
    ) -> LeasedPart | None:
        """Lease the part that holds the byte at `offset`. None where the daemon has no room for `room_s` seconds.

        Raises DaemonUnavailable where no daemon answers for `timeout_s`, DeadlineExceeded where the bytes do not come
        in that time, NotAllowed, SourceChanged where the source has another version, and the errors of fills.
        """
        loop = asyncio.get_running_loop()
        began_at = loop.time()
        while True:
            left_s = timeout_s - (loop.time() - began_at)
            try:
                async with self._room:
                    link = await self._connected()
                    found = await link.ask(version, offset, max(0.0, left_s))
            except DaemonUnavailable:
                if left_s <= PROBE_FIRST_S:
                    raise
                await asyncio.sleep(PROBE_FIRST_S)  # until it is started again
                continue
            if found is not None or loop.time() - began_at >= room_s:
                return found
            await asyncio.sleep(ROOM_PAUSE_S)

    def release(self, part: LeasedPart) -> None:
        """End a lease, and close its descriptor."""
        os.close(part.fd)
        number, digest = part.mark
        if self._link is not None and self._link.number == number:
            self._link.send(Message(Op.RELEASE, digest=digest))

    def close(self) -> None:
        """End the connection, and with it all leases."""
        if self._link is not None:
            self._link.end()
            self._link = None

    async def _connected(self) -> _Link:
        async with self._connecting:
            if self._link is None or self._link.ended:
                self._link = None
                self._link = await _connect(self._path)
            return self._link


_numbers = itertools.count(1)


async def _connect(path: str) -> _Link:
    """Raises DaemonUnavailable."""
    loop = asyncio.get_running_loop()
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    channel.setblocking(False)
    try:
        await loop.sock_connect(channel, path)
        await loop.sock_sendall(channel, wire.encode(Op.IDENTIFY, wire.MAGIC))
        answer = wire.decode(await asyncio.wait_for(loop.sock_recv(channel, wire.MAX_MESSAGE_BYTES), HELLO_S))
        if answer.op is not Op.WELCOME:
            raise DaemonUnavailable(answer.text)
    except (OSError, ValueError, asyncio.TimeoutError) as error:
        channel.close()
        raise DaemonUnavailable(f"no daemon answers at {path} ({error})") from None
    except BaseException:
        channel.close()
        raise
    return _Link(channel)


class _Link:
    """A greeted connection. Sends and receives without waiting."""

    def __init__(self, channel: socket.socket) -> None:
        self.number = next(_numbers)
        self.ended, self._full = False, False
        self._channel, self._loop = channel, asyncio.get_running_loop()
        self._waiting: dict[int, asyncio.Future[LeasedPart | None]] = {}
        self._unsent: deque[bytes] = deque()
        self._requests: Iterator[int] = itertools.cycle(range(1, 1 << 32))
        self._loop.add_reader(channel, self._receive_all)

    async def ask(self, version: ObjectVersion, offset: int, timeout_s: float) -> LeasedPart | None:
        """Send a READ and wait for its answer; see `ObjectReads.lease`."""
        number = next(self._requests)
        answered: asyncio.Future[LeasedPart | None] = self._loop.create_future()
        self._waiting[number] = answered
        timer = self._loop.call_later(timeout_s, _late, answered, version, timeout_s)
        try:
            named = f"{version.etag} {version.uri}"
            self.send(Message(Op.READ, number, offset, version.size_bytes, text=named))
            return await answered
        except asyncio.CancelledError:
            if answered.done() and not answered.cancelled() and not answered.exception():
                self._give_back(answered.result())  # it came together with the cancellation
            raise
        finally:
            timer.cancel()
            del self._waiting[number]

    def _give_back(self, part: LeasedPart | None) -> None:
        if part is not None:
            os.close(part.fd)
            self.send(Message(Op.RELEASE, digest=part.mark[1]))

    def send(self, message: Message) -> None:
        """Send a message, now or as soon as the daemon takes it."""
        if not self.ended:
            self._unsent.append(wire.encode(*message))
            self._send_all()

    def end(self) -> None:
        """End the connection; those that wait raise DaemonUnavailable."""
        if self.ended:
            return
        self.ended = True
        self._loop.remove_reader(self._channel)
        self._loop.remove_writer(self._channel)
        self._channel.close()
        for each in self._waiting.values():
            _fail(each, DaemonUnavailable("the daemon went away"))

    def _send_all(self) -> None:
        try:
            while self._unsent:
                self._channel.send(self._unsent[0])
                self._unsent.popleft()
            if self._full:
                self._loop.remove_writer(self._channel)
            self._full = False
        except (BlockingIOError, InterruptedError):
            self._full = True
            self._loop.add_writer(self._channel, self._send_all)
        except OSError:
            self.end()

    def _receive_all(self) -> None:
        try:
            while not self.ended:
                data, fd = datagrams.receive(self._channel, wire.MAX_MESSAGE_BYTES)
                if not data:  # the other end is closed
                    self.end()
                    return
                self._received(wire.decode(data), fd)
        except (BlockingIOError, InterruptedError):
            pass
        except (OSError, ValueError):  # the other end is broken, or no daemon of ours
            self.end()

    def _received(self, message: Message, fd: int | None) -> None:
        waiting = self._waiting.get(message.number)
        if message.op is Op.GRANT and fd is not None:
            _, _, begin, end, at = message.text.split(" ")[:5]
            part = LeasedPart(fd, int(begin), int(end), int(at), (self.number, message.digest))
            if waiting is None or waiting.done():  # its caller has left
                self._give_back(part)
            else:
                waiting.set_result(part)
        elif waiting is not None and not waiting.done():
            if message.op is Op.REFUSED:
                waiting.set_result(None)
            elif message.op is Op.FAILED:
                waiting.set_exception(from_code(message.size, message.text))


def _late(waiting: asyncio.Future[LeasedPart | None], version: ObjectVersion, timeout_s: float) -> None:
    _fail(waiting, DeadlineExceeded(f"{version.uri} did not come in {timeout_s:.0f} s"))


def _fail(waiting: asyncio.Future[LeasedPart | None], error: CacheError) -> None:
    if not waiting.done():
        waiting.set_exception(error)
