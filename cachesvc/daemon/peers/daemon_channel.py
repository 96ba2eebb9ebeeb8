"""The agent's side of its channel to the daemon: questions that wait for an answer, and messages that do not."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late
from contextlib import contextmanager

from cachesvc.core.errors import NotFound, TierFailed
from cachesvc.core.model import ExtentId
from cachesvc.daemon.blocks.replies import Lent
from cachesvc.daemon.peers import messages
from cachesvc.daemon.processes.datagrams import send
from cachesvc.tiers.fill_progress import FillProgress

OPEN_S = 10.0
"""The daemon may have to wait for an eviction before it begins a fill that a peer wants to follow."""
KEEP_S = 1.0
TAKE_S = 8.0
"""Less than the calling node waits."""
_Reply = messages.LentExtent | messages.ExtentsKept | messages.ExtentsTaken
_Answer = tuple[_Reply, list[int]]


class DaemonChannel:
    """Safe from any thread. `on_message` gets what the daemon sends by itself, on the thread of `listen`."""

    def __init__(self, channel: socket.socket, on_message: Callable[[messages.ToAgent], None]) -> None:
        self._channel = channel
        self._on_message = on_message
        self._numbers = itertools.count(1)
        self._waiting: dict[int, Future[_Answer]] = {}

    def listen(self) -> None:
        """Read the daemon's messages, and end this process when the daemon ends."""
        try:
            while (received := messages.receive_in_agent(self._channel)) is not None:
                message, descriptors = received
                if isinstance(message, _Reply):
                    self._answered(message, descriptors)
                else:
                    self._on_message(message)
        finally:
            # Also after an error, as when the daemon died with an unread message: the next daemon needs the address.
            os._exit(0)

    def send(self, message: messages.ToDaemon) -> None:
        """Send a message that has no answer."""
        send(self._channel, message)

    @contextmanager
    def lent(self, extent: ExtentId) -> Iterator[Lent]:
        """Borrow an extent that is resident or being filled. Raises NotFound, TierFailed."""
        number = next(self._numbers)
        message, descriptors = self._ask(number, messages.BorrowExtent(number, extent), OPEN_S)
        assert isinstance(message, messages.LentExtent)
        try:
            if not descriptors:
                raise NotFound(f"extent {extent.hex()} is not resident here")
            if len(descriptors) == 1:
                yield Lent(descriptors[0], message.size_bytes, message.digests, maker=message.maker)
                return
            progress = FillProgress(descriptors[1], message.size_bytes)
            try:
                yield Lent(descriptors[0], message.size_bytes, progress=progress)
            finally:
                progress.close()
        finally:
            for fd in descriptors:
                os.close(fd)

    def keep(
        self, extents: list[ExtentId], later: bool = False, without_source: bool = False
    ) -> set[ExtentId]:
        """Ask the daemon to fetch extents that peers want; return those that it has or fetches, now or, if that is soon
        enough, `later`. `without_source`: the peers cannot read the source."""
        number = next(self._numbers)
        try:
            message, _ = self._ask(
                number, messages.KeepExtents(number, tuple(extents), later, without_source), KEEP_S
            )
        except TierFailed:
            return set()
        assert isinstance(message, messages.ExtentsKept)
        return set(message.extents)

    def take(self, dataset: str, extents: list[ExtentId]) -> tuple[bytes, bool]:
        """Ask the daemon to fetch extents of a node that leaves; return `taken` and `unknown` of `TakeReply`. Raises
        TierFailed."""
        number = next(self._numbers)
        message, _ = self._ask(number, messages.TakeExtents(number, dataset, tuple(extents)), TAKE_S)
        assert isinstance(message, messages.ExtentsTaken)
        return message.taken, message.unknown

    def _ask(self, number: int, question: messages.ToDaemon, timeout_s: float) -> _Answer:
        waiting: Future[_Answer] = Future()
        self._waiting[number] = waiting
        self.send(question)
        try:
            return waiting.result(timeout_s)
        except Late:
            if waiting.cancel():
                raise TierFailed(f"the daemon did not answer in {timeout_s:.0f} s") from None
            return waiting.result()
        finally:
            self._waiting.pop(number, None)

    def _answered(self, message: _Reply, descriptors: list[int]) -> None:
        waiting = self._waiting.pop(message.number, None)
        if waiting is not None and waiting.set_running_or_notify_cancel():
            waiting.set_result((message, descriptors))
        else:
            for fd in descriptors:
                os.close(fd)
