"""Serves the grants socket: readers ask for extents and get read-only descriptors. Wire format: core/wire.py.

A reader lives as long as its connection. When its process dies the kernel closes the connection, which ends the reader's
leases, its plan and its claim on the dataset. There is no heartbeat.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import cachesvc
from cachesvc.core import commands, events, wire
from cachesvc.core.errors import CacheError, DaemonUnavailable, InvalidInput
from cachesvc.core.histogram import Histogram
from cachesvc.core.model import RAM, DatasetId, ExtentId, ObjectVersion, ReaderId
from cachesvc.core.stalls import StallReport
from cachesvc.core.wire import Message, Op
from cachesvc.daemon.access.tenants import NO_USER, Peer
from cachesvc.daemon.datasets import ServedDataset
from cachesvc.daemon.grants.acceptor import Acceptor
from cachesvc.daemon.grants.bypass import BYPASSED, Bypass
from cachesvc.daemon.grants.plan_intake import PlanEntries, PlanIntake, ReceivedPlan
from cachesvc.daemon.grants.reader_events import ConnectedReader, ReaderEvents
from cachesvc.system import datagrams

log = logging.getLogger(__name__)


@dataclass(eq=False)
class GrantsServer:
    """Keeps the connected readers and passes their requests to the runner. Decides nothing."""

    _requests: ReaderEvents
    _plans: PlanIntake
    _watch: Callable[[int, Callable[[], object]], None]
    _unwatch: Callable[[int], None]
    _next_id: Callable[[], int]
    bypass: Bypass
    _readers: dict[ReaderId, ConnectedReader] = field(default_factory=dict)
    _tokens: dict[int, ConnectedReader] = field(default_factory=dict)
    waits: dict[str, Histogram] = field(
        default_factory=lambda: {answer: Histogram() for answer in ("granted", "refused", "failed")}
    )
    """How long readers waited for each kind of answer to a request for an extent."""

    def listen(self, path: str, mode: int, max_readers: int) -> None:
        """Open the socket. Raises as `bind`."""
        self._acceptor = Acceptor(path, mode, max_readers, self._accepted)
        self._watch(self._acceptor.listener.fileno(), self._acceptor.accept)

    def is_in_place(self) -> bool:
        """Tell whether the socket's path still leads to this server."""
        return self._acceptor.is_in_place()

    def bind_again(self) -> None:
        """Listen at a new socket, since the file of the old one was removed; connections stay."""
        self._unwatch(self._acceptor.listener.fileno())
        try:
            self._acceptor.bind_again()
        finally:
            self._watch(self._acceptor.listener.fileno(), self._acceptor.accept)

    def close(self) -> None:
        """Close every connection and remove the socket file."""
        for reader in list(self._readers.values()):
            self._drop(reader)
        self._unwatch(self._acceptor.listener.fileno())
        self._acceptor.close()

    def bypass_changed(self) -> None:
        """Have all readers connect again. While the cache is bypassed the daemon takes no plans, and reads nothing for
        them."""
        for reader in self.connected():
            self._drop(reader)

    def user_of(self, reader: ReaderId) -> int:
        """Return the uid at the other end of a live reader's connection, as the kernel states it; NO_USER for a reader
        that is gone."""
        found = self._readers.get(reader)
        return found.peer.uid if found else NO_USER

    def caller(self, token: int) -> Peer | None:
        """Return the user of the live connection that was given this token. Safe from any thread."""
        found = self._tokens.get(token)
        return found.peer if found else None

    def readers(self) -> Counter[DatasetId]:
        """Count the live readers of each dataset, without connections that are not welcomed yet, prepare for readers, or
        only identify a caller."""
        return Counter(each.dataset.id for each in self.connected() if each.dataset is not None)

    def connected(self) -> list[ConnectedReader]:
        """The live readers of datasets, without those that prepare for readers."""
        readers = (each for each in self._readers.values() if not each.features & wire.PREPARES)
        return [reader for reader in readers if reader.dataset is not None]

    def grant(
        self, command: commands.Grant, fd: int, holes: str, content: bytes, size_bytes: int = 0
    ) -> bool:
        """Send a descriptor, which stays the caller's to close, and the digest of the copy's bytes. `size_bytes`: what the
        copy takes; 0: its extent's size in the catalog.

        False, and nothing is sent, where the kernel carries no more descriptors, or a part of an object would come from an
        extent with holes.
        """
        reader = self._readers.get(command.reader)
        if reader is None:
            return True
        extent, text = command.extent, f"{command.tier} {command.stay}"
        if (part := reader.parts.get(command.request)) is not None:
            if holes:
                return False
            text = f"{text} {part.begin} {part.end} {part.at}"
            message = wire.encode(Op.GRANT, command.request, 0, part.extent_bytes, extent, text)
            if sent := self._reply(reader, message, fd):
                self._requests.answered(reader, command.request)
            return sent
        if (dataset := reader.dataset) is None:
            return True
        index = dataset.index_of[extent]
        more = " peer" * command.from_peer + (f" {wire.HOLES}{holes}" if holes else "")
        size_bytes = size_bytes or dataset.sizes[index]
        message = wire.encode(Op.GRANT, command.request, index, size_bytes, content, text + more)
        sent = self._reply(reader, message, fd)
        if sent:
            self._answered(reader, command.request, "granted")
        return sent

    def recall(self, command: commands.Recall) -> None:
        """Execute `Recall`: ask for the release of a granted extent."""
        text = wire.WRONG if command.wrong else wire.ROOM
        self._about(command.reader, Op.RECALL, 0, command.extent, text=text)

    def refuse(self, command: commands.Refuse) -> None:
        """Execute `Refuse`: tell a reader to read an extent elsewhere."""
        self._answered(self._readers.get(command.reader), command.request, "refused")
        self._about(command.reader, Op.REFUSED, command.request, command.extent)

    def fail(self, command: commands.Fail) -> None:
        """Execute `Fail`: tell a reader why it cannot have an extent."""
        self._answered(self._readers.get(command.reader), command.request, "failed")
        self._about(command.reader, Op.FAILED, command.request, command.extent, command.code, command.message)

    def _answered(self, reader: ConnectedReader | None, request: int, answer: str) -> None:
        asked_at = reader.asked_at.pop(request, None) if reader is not None else None
        if asked_at is not None:
            self.waits[answer].observe(time.monotonic() - asked_at)

    def offer(self, preparer: ReaderId, number: int, index: int, size_bytes: int, target: int) -> None:
        """Send a preparer an extent to make. One that takes no more messages is disconnected, and its work fails."""
        reader = self._readers.get(preparer)
        message = wire.encode(Op.PREPARE, number, index, size_bytes)
        if reader is not None and not self._reply(reader, message, target):
            self._drop(reader)

    def _accepted(self, channel: socket.socket, peer: Peer) -> None:
        reader = ConnectedReader(ReaderId(self._next_id()), channel, peer, secrets.randbits(64))
        self._readers[reader.id] = self._tokens[reader.token] = reader
        self._watch(channel.fileno(), partial(self._receive, reader))
        log.debug("reader connected", extra={"reader": reader.id, "peer_uid": peer.uid})

    def _drop(self, reader: ConnectedReader) -> None:
        if reader.gone:
            return
        reader.gone = True
        del self._readers[reader.id], self._tokens[reader.token]
        self._plans.ended(reader.id)
        if reader.plan is None:
            self._unwatch(reader.channel.fileno())
        else:
            self._plans.forget(reader.plan)
        datagrams.close(reader.channel)
        self._acceptor.left(reader.peer)
        self._requests.gone(reader)

    def _broken(self, reader: ConnectedReader, error: Exception) -> None:
        log.warning("a reader broke the protocol", extra={"reader": reader.id, "error": str(error)})
        self._drop(reader)

    def _receive(self, reader: ConnectedReader) -> None:
        """Take in one message."""
        try:  # one byte more, so that a longer message is seen to be
            data, fd = datagrams.receive(reader.channel, wire.MAX_MESSAGE_BYTES + 1)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._drop(reader)
            return
        try:
            if not data:
                self._drop(reader)
                return
            message = wire.decode(data)
            if message.op is Op.PLAN and reader.dataset is not None and fd is not None:
                if self.bypass.on:
                    return
                is_local = message.text == wire.LOCAL
                plan = ReceivedPlan(fd, message.number, message.value, reader.dataset.extent_ids, is_local)
                fd = None
                self._take_plan(reader, plan)
            else:
                self._dispatch(reader, message)
        except (ValueError, IndexError) as error:
            self._broken(reader, error)
        finally:
            if fd is not None:  # no other message has one
                os.close(fd)

    def _dispatch(self, reader: ConnectedReader, message: Message) -> None:
        op, dataset = message.op, reader.dataset
        if op in (Op.HELLO, Op.IDENTIFY):
            self._greeted(reader, message)
        elif op is Op.READ and reader.greeted:
            self._read(reader, message)
        elif op is Op.RELEASE and reader.greeted and dataset is None:
            self._requests.handle(events.Released(reader.id, ExtentId(message.digest)))
        elif dataset is None:
            raise InvalidInput(f"{op.name} before HELLO")
        elif op is Op.GET:
            extent, unclaimed = dataset.extent_ids[message.value], reader.features & wire.CLAIMS_NOTHING
            if self.bypass.on:
                code = DaemonUnavailable.code
                self._about(reader.id, Op.FAILED, message.number, extent, code, BYPASSED)
                return
            if reader.features & wire.RESIDENT_ONLY and not self._requests.is_resident(extent):
                self._about(reader.id, Op.REFUSED, message.number, extent)
                return
            size_bytes = dataset.sizes[message.value] if unclaimed else 0
            demand = events.Demanded(reader.id, message.number, extent, size_bytes=size_bytes, job=reader.job)
            reader.asked_at.setdefault(message.number, time.monotonic())
            self._requests.handle(demand)
        elif op is Op.RELEASE:
            self._requests.handle(events.Released(reader.id, dataset.extent_ids[message.value]))
        elif op is Op.PASSED:
            self._requests.handle(events.Passed(reader.id, message.value))
        elif op is Op.WAITED:
            self._requests.waited(reader, dataset.id, StallReport.decode(message.text))
        elif op is Op.CATALOG:
            self._catalog(reader, message)
        elif op is Op.HOLD:
            # A file takes no memory, but its release comes like that of a held extent.
            size_bytes = dataset.sizes[message.value] if message.text == RAM else 0
            self._requests.held(reader, dataset.extent_ids[message.value], size_bytes)
        elif op is Op.SUSPECT:
            self._requests.suspected(dataset.extent_ids[message.value])
        elif op is Op.MAKING:
            self._requests.preparers.progress(reader.id, message.number, message.value, message.text)
        elif op is Op.MADE:
            made = self._requests.preparers.made
            made(reader.id, message.number, message.value, message.size, message.text)
        else:
            raise InvalidInput(f"{op.name} is not for the daemon")

    def _greeted(self, reader: ConnectedReader, message: Message) -> None:
        if message.number != wire.MAGIC:
            text = (
                f"the daemon is of release {cachesvc.__version__}, whose protocol this program does not speak;"
                " install one release of cachesvc for both"
            )
            self._reply(reader, wire.encode(Op.FAILED, 0, 0, DaemonUnavailable.code, text=text))
            raise InvalidInput("a greeting of another protocol: its release is another one")
        if reader.greeted:
            raise InvalidInput("a second greeting")
        reader.greeted = True
        reader.features = message.size
        reader.join_job(message.value)
        if message.op is Op.IDENTIFY:
            self._reply(reader, wire.encode(Op.WELCOME, size=reader.token))
            return

        def loaded(found: ServedDataset | CacheError) -> None:
            if isinstance(found, CacheError):
                self._reply(reader, wire.encode(Op.FAILED, 0, 0, found.code, text=str(found)))
                return
            reader.dataset = found
            budgets = " ".join(map(str, self._requests.tier_budgets()))
            welcome = wire.encode(
                Op.WELCOME, 0, len(found.extent_ids), reader.token, wire.STEP_BUCKETS, budgets
            )
            self._reply(reader, welcome)

        self._requests.connected(reader, DatasetId(message.digest.hex()), loaded)

    def _take_plan(self, reader: ConnectedReader, plan: ReceivedPlan) -> None:
        if not self._plans.admit(reader.id, reader.peer.uid, plan):
            log.warning(
                "a plan is not taken: the plans of its user have too many rows",
                extra={"reader": reader.id, "peer_uid": reader.peer.uid, "rows": plan.rows},
            )
            self._plans.forget(plan)
            self._requests.handle(events.PlanEnded(reader.id))
            return
        reader.plan = plan
        self._unwatch(reader.channel.fileno())

        def then(result: PlanEntries | CacheError) -> None:
            if reader.gone:
                return
            reader.plan = None
            self._watch(reader.channel.fileno(), partial(self._receive, reader))
            if isinstance(result, CacheError):
                self._broken(reader, result)
            else:
                self._requests.planned(reader, result)

        self._plans.read(plan, reader.peer.uid, then)

    def _read(self, reader: ConnectedReader, message: Message) -> None:
        """Take in a READ."""
        etag, _, uri = message.text.partition(" ")
        known = not message.number or message.number in reader.parts
        if reader.dataset is not None or known or not uri:
            raise InvalidInput(
                "a READ of no object, of a reader of a dataset, or with the number of another one"
            )
        version = ObjectVersion(uri, message.size, etag)
        try:
            self._requests.read(reader, message.number, version, message.value)
        except CacheError as error:
            self._reply(reader, wire.encode(Op.FAILED, message.number, 0, error.code, text=str(error)))

    def _catalog(self, reader: ConnectedReader, message: Message) -> None:
        """Send the catalog of a reader's dataset."""
        assert reader.dataset is not None
        if not self._reply(reader, wire.encode(Op.CATALOG, message.number), reader.dataset.catalog_fd):
            text = "too many descriptors that readers have not taken are under way; try again"
            self._reply(reader, wire.encode(Op.FAILED, message.number, 0, DaemonUnavailable.code, text=text))

    def _reply(self, reader: ConnectedReader, message: bytes, fd: int | None = None) -> bool:
        """Send one message without waiting. False where the kernel carries no more of the daemon's descriptors. A reader
        whose connection is broken, or who does not read its replies, is disconnected: that bounds its queue."""
        try:
            datagrams.send(reader.channel, message, fd)
        except OSError as error:
            if error.errno == errno.ETOOMANYREFS:
                return False
            self._drop(reader)
        return True

    def _about(
        self, to: ReaderId, op: Op, request: int, extent: ExtentId, code: int = 0, text: str = ""
    ) -> None:
        reader = self._readers.get(to)
        if reader is not None:
            self._requests.answered(reader, request)
            index = reader.dataset.index_of[extent] if reader.dataset is not None else 0
            self._reply(reader, wire.encode(op, request, index, code, extent, text))
