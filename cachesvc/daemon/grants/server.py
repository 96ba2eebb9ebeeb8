"""The grants socket: readers ask for extents and get read-only descriptors. Wire format: core/wire.py.

A reader's life is its connection. When it dies the kernel closes the connection, and that ends its leases,
its plan and its claim on the dataset; there is no heartbeat.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import socket
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import cachesvc
from cachesvc.core import commands, events, wire
from cachesvc.core.errors import CacheError, DaemonUnavailable, InvalidInput
from cachesvc.core.model import RAM, DatasetId, ExtentId, ReaderId
from cachesvc.core.stalls import StallReport
from cachesvc.core.wire import Message, Op
from cachesvc.daemon.access.tenants import NOBODY, Peer, admits, peer_of
from cachesvc.daemon.grants.deferred_close import Disposal, harmless
from cachesvc.daemon.grants.in_flight import Unread
from cachesvc.daemon.grants.listening import bind, identity, remove, spare, turn_away
from cachesvc.daemon.grants.plans import Entries, Handed, Plans
from cachesvc.daemon.grants.readers import Answers, Connection, Known, Reader
from cachesvc.system import datagrams

log = logging.getLogger(__name__)

ANSWERS_BYTES = 1 << 18
"""A reader's buffer, as far as the kernel allows (`wmem_max`, 208 KiB where nobody changed it): 333 answers of 1.25 KiB,
which is what the kernel counts for one, twice over. Its own default holds half."""


class GrantsServer:
    """Accepts readers and translates both ways; decides nothing."""

    def __init__(
        self,
        path: str,
        mode: int,
        answers: Answers,
        plans: Plans,
        disposal: Disposal,
        watch: Callable[[int, Callable[[], object]], None],
        unwatch: Callable[[int], None],
        next_id: Callable[[], int],
        max_readers: int,
        max_unread: int,
        listener: socket.socket | None,
    ) -> None:
        """`max_unread`: descriptors that the kernel carries for us. `listener`: one that another daemon has bound to
        `path`, with whoever knocks there."""
        self._max_readers = max_readers
        self._unread = Unread(max_unread, lambda reader: self._end(reader.channel, reader.peer.uid))
        self._answers = answers
        self._plans = plans
        self._disposal = disposal
        self._watch = watch
        self._unwatch = unwatch
        self._next_id = next_id
        self._readers: dict[ReaderId, Reader] = {}
        self._tokens: dict[int, Reader] = {}
        self._path = path
        self._listener = listener or bind(path, mode)
        if listener is not None:
            with suppress(FileNotFoundError):  # somebody removed it
                os.chmod(path, mode)  # it was bound with the other daemon's
        self._file = identity(path)
        self._spare = spare()
        watch(self._listener.fileno(), self._accept)

    def close(self) -> None:
        """Close every connection and remove the socket file."""
        for reader in list(self._readers.values()):
            self._drop(reader)
        self._unread.close()
        self._unwatch(self._listener.fileno())
        self._listener.close()
        os.close(self._spare)
        remove(self._path, self._file)

    def handed(self) -> tuple[int, list[Connection]]:
        """What another daemon takes over: the listener's descriptor and every connection, all still ours."""
        return self._listener.fileno(), [
            Connection(
                r.id,
                r.token,
                r.channel.fileno(),
                r.greeted,
                r.wanted,
                r.dataset is not None,
                r.launch,
                r.knows_holes,
            )
            for r in self._readers.values()
        ]

    def adopt(self, given: Connection, dataset: Known | None) -> bool:
        """Go on with a connection of another daemon, whose descriptor is ours from here on. One that waits for its
        welcome has no dataset yet, and is welcomed by and by. False, and it ends, where our rules keep its user out, or
        its dataset is gone: its user is told why when it connects again."""
        channel = socket.socket(fileno=given.descriptor)
        peer = peer_of(channel)
        if given.welcomed and (dataset is None or not admits(dataset.rules, peer)):
            self._end(channel, peer.uid)
            return False
        channel.setblocking(False)
        reader = Reader(given.id, channel, peer, given.token, given.greeted, given.wanted, dataset)
        reader.belongs(given.launch)
        reader.knows_holes = given.knows_holes
        self._enter(reader)
        self._unread.adopt(reader)
        if given.wanted and dataset is None:
            self._welcome(reader)
        return True

    def adopt_plan(self, event: events.Planned) -> None:
        """An adopted reader's plan, as another daemon had it."""
        reader, rows = ReaderId(event.plan), len(event.rows) + len(event.following)
        self._plans.rows.adopt(reader, self.user_of(reader), rows)

    def here(self, reader: ReaderId) -> bool:
        """Whether the reader is still connected."""
        return reader in self._readers

    def peer(self, reader: ReaderId) -> Peer:
        """The user behind a live reader."""
        return self._readers[reader].peer

    def user_of(self, reader: ReaderId) -> int:
        """The uid at the other end of a live reader's connection, as the kernel says; NOBODY where there is none."""
        found = self._readers.get(reader)
        return found.peer.uid if found else NOBODY

    def job_of(self, reader: ReaderId) -> int:
        """What a live reader has in common with the others of its job and user, and with nobody else; 0: nothing."""
        found = self._readers.get(reader)
        return found.job if found else 0

    def caller(self, token: int) -> Peer | None:
        """The user behind the live connection that was given this token. Safe from any thread."""
        found = self._tokens.get(token)
        return found.peer if found else None

    def readers_of(self, dataset: DatasetId) -> int:
        """Live readers of a dataset."""
        return self.readers()[dataset]

    def readers(self) -> Counter[DatasetId]:
        """How many live readers each dataset has; not those that wait for their welcome, or only say who calls."""
        return Counter(r.dataset.id for r in self._readers.values() if r.dataset is not None)

    def grant(self, command: commands.Grant, fd: int, holes: str = "") -> bool:
        """Send a descriptor; it stays the caller's to close. False: the reader's user has too many that it does not take,
        the kernel carries no more, or the reader is of a release that knows no holes, and nothing was sent."""
        reader = self._readers.get(command.reader)
        if reader is None or reader.dataset is None:
            return True
        if holes and not reader.knows_holes:
            return False
        dataset, extent = reader.dataset, command.extent
        index = dataset.index_of[extent]
        more = " peer" * command.from_peer + (f" {wire.HOLES}{holes}" if holes else "")
        text = f"{command.tier} {command.stay}{more}"
        granted = wire.encode(Op.GRANT, command.request, index, dataset.sizes[index], extent, text)
        return self._give(reader, granted, fd)

    def recall(self, to: ReaderId, extent: ExtentId, wrong: bool) -> None:
        """Ask for what was granted of an extent."""
        self._answer(to, Op.RECALL, 0, extent, text=wire.WRONG if wrong else wire.ROOM)

    def refuse(self, to: ReaderId, request: int, extent: ExtentId) -> None:
        """Say "read it elsewhere"."""
        self._answer(to, Op.REFUSED, request, extent)

    def fail(self, to: ReaderId, request: int, extent: ExtentId, code: int, message: str) -> None:
        """Say why an extent cannot be had."""
        self._answer(to, Op.FAILED, request, extent, code, message)

    def _answer(
        self, to: ReaderId, op: Op, request: int, extent: ExtentId, code: int = 0, text: str = ""
    ) -> None:
        reader = self._readers.get(to)
        if reader is not None and reader.dataset is not None:
            index = reader.dataset.index_of[extent]
            self._write(reader, wire.encode(op, request, index, code, extent, text))

    def _give(self, reader: Reader, message: bytes, fd: int) -> bool:
        if not self._unread.may_send(reader):
            return False
        sent = self._write(reader, message, fd)
        if sent and reader.id in self._readers:
            self._unread.sent(reader)
        return sent

    def _write(self, reader: Reader, message: bytes, fd: int | None = None) -> bool:
        try:
            datagrams.send(reader.channel, message, fd)
        except OSError as error:
            if error.errno == errno.ETOOMANYREFS:
                return False  # too many of our user's descriptors are under way
            # Also a reader that does not read its answers: its socket buffer is the bound of its queue.
            self._lost(reader, error)
        return True

    def _accept(self) -> None:
        try:
            channel, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            self._shed(error)
            return
        if self._places_taken() >= self._max_readers:
            log.warning("too many readers", extra={"limit": self._max_readers})
            self._turn_away(
                channel,
                f"the daemon has {self._max_readers} readers, as many as its limit of open files allows",
            )
            return
        channel.setblocking(False)
        channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, ANSWERS_BYTES)
        peer = peer_of(channel)
        if self._crowds_out(peer):
            log.warning("one user has half of all connections", extra={"peer_uid": peer.uid})
            self._turn_away(channel, "this user has half of all connections to the daemon")
            return
        reader = Reader(ReaderId(self._next_id()), channel, peer, secrets.randbits(64))
        self._enter(reader)
        log.debug("reader connected", extra={"reader": reader.id, "peer_uid": peer.uid})

    def _enter(self, reader: Reader) -> None:
        self._readers[reader.id] = self._tokens[reader.token] = reader
        self._watch(reader.channel.fileno(), partial(self._read, reader))

    def _crowds_out(self, peer: Peer) -> bool:
        """Another user than the daemon's gets half of all places at most. Counted only when half are taken."""
        half = self._max_readers // 2
        if self._places_taken() < half or peer.uid == os.geteuid():
            return False
        live = sum(reader.peer.uid == peer.uid for reader in self._readers.values())
        return live + self._disposal.held(peer.uid) + self._unread.held(peer.uid) >= half

    def _places_taken(self) -> int:
        """A connection that cannot be closed takes its place until it is."""
        return len(self._readers) + self._disposal.count() + self._unread.count()

    def _turn_away(self, channel: socket.socket, why: str) -> None:
        turn_away(channel, why)
        self._end(channel, peer_of(channel).uid)

    def _end(self, channel: socket.socket, user: int) -> None:
        """Close a connection."""
        if datagrams.emptied(channel):
            channel.close()
        else:
            self._disposal.take(user, [channel.detach()])

    def _shed(self, error: OSError) -> None:
        """No descriptor is left: with the spare one the caller is turned away, or it would knock for ever."""
        log.error("a reader cannot be accepted", extra={"error": error.strerror})
        os.close(self._spare)
        try:
            self._turn_away(
                self._listener.accept()[0], "the daemon has as many files open as its limit allows"
            )
        except OSError:
            pass
        self._spare = spare()

    def _read(self, reader: Reader) -> None:
        """Take in one message."""
        user = reader.peer.uid
        self._unread.look(reader)
        try:  # one byte more, so that a longer one is seen to be
            if self._disposal.full(user) and datagrams.carries(reader.channel):
                self._broken(reader, "descriptors, while others of its user, or of many, cannot be closed")
                return
            datagram, given = datagrams.receive_all(reader.channel, wire.MAX_MESSAGE_BYTES + 1)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._lost(reader, error)
            return
        memory = [fd for fd in given if harmless(fd)]
        if len(memory) < len(given):
            self._disposal.take(user, set(given).difference(memory))
        try:
            if len(memory) < len(given):
                raise InvalidInput("a descriptor of what is no memory, or too much")
            if not datagram:
                self._drop(reader)
                return
            message = wire.decode(datagram)
            if message.op is Op.PLAN and reader.dataset is not None and memory:
                reader.plan = Handed(memory.pop(), message.number, message.value, reader.dataset.extent_ids)
                self._take(reader, reader.plan)
            else:
                self._dispatch(reader, message)
        except (ValueError, IndexError) as error:
            self._broken(reader, error)
        finally:
            for fd in memory:  # nobody asked for it
                os.close(fd)

    def _lost(self, reader: Reader, error: OSError) -> None:
        if error.errno == errno.ECONNRESET:  # what the kernel says of one that closed with something unread
            self._unread.taken(reader)
        self._drop(reader)

    def _broken(self, reader: Reader, error: Exception | str) -> None:
        log.warning("a reader broke the protocol", extra={"reader": reader.id, "error": str(error)})
        self._drop(reader)

    def _take(self, reader: Reader, plan: Handed) -> None:
        if not self._plans.rows.take(reader.id, reader.peer.uid, plan.rows + plan.more):
            log.warning(
                "a plan is not taken: its user's others have all the rows that are for one",
                extra={"reader": reader.id, "peer_uid": reader.peer.uid, "rows": plan.rows},
            )
            reader.plan = None
            self._plans.forget(plan)
            self._answers.handle(events.PlanEnded(reader.id))
            return
        self._unwatch(reader.channel.fileno())

        def took(found: Entries | CacheError) -> None:
            if reader.id not in self._readers:
                return
            reader.plan = None
            self._watch(reader.channel.fileno(), partial(self._read, reader))
            if isinstance(found, CacheError):
                self._broken(reader, found)
            else:
                self._answers.planned(reader.id, found)

        self._plans.take(plan, reader.peer.uid, took)

    def _dispatch(self, reader: Reader, message: Message) -> None:
        op, dataset = message.op, reader.dataset
        if op in (Op.HELLO, Op.IDENTIFY):
            self._hello(reader, message)
        elif dataset is None:
            raise InvalidInput(f"{op.name} before HELLO")
        elif op is Op.GET:
            extent = dataset.extent_ids[message.value]
            self._answers.handle(events.Demanded(reader.id, message.number, extent, job=reader.job))
        elif op is Op.RELEASE:
            self._answers.handle(events.Released(reader.id, dataset.extent_ids[message.value]))
        elif op is Op.PASSED:
            self._answers.passed_or_gone(reader.id, message.value)
        elif op is Op.WAITED:
            self._answers.waited(dataset.id, StallReport.decode(message.text))
        elif op is Op.CATALOG:
            if not self._give(reader, wire.encode(Op.CATALOG, message.number), dataset.catalog_fd):
                text = "too many descriptors that readers have not taken are under way; try again"
                self._write(
                    reader, wire.encode(Op.FAILED, message.number, 0, DaemonUnavailable.code, text=text)
                )
        elif op is Op.HOLD:
            # A file costs no memory, but its release comes as one of what was held, all the same.
            size_bytes = dataset.sizes[message.value] if message.text == RAM else 0
            self._answers.held(reader.id, dataset.extent_ids[message.value], size_bytes)
        elif op is Op.SUSPECT:
            self._answers.suspected(dataset.extent_ids[message.value])
        else:
            raise InvalidInput(f"{op.name} is not for the daemon")

    def _hello(self, reader: Reader, message: Message) -> None:
        if message.number != wire.MAGIC:
            text = (
                f"the daemon is of release {cachesvc.__version__}, whose protocol this program does not speak;"
                " install one release of cachesvc for both"
            )
            self._write(reader, wire.encode(Op.FAILED, 0, 0, DaemonUnavailable.code, text=text))
            raise InvalidInput("a greeting of another protocol: its release is another one")
        if reader.greeted:
            raise InvalidInput("a second greeting")
        reader.greeted = True
        reader.knows_holes = message.size >= wire.KNOWS_HOLES
        reader.belongs(message.value)
        if message.op is Op.IDENTIFY:
            self._write(reader, wire.encode(Op.WELCOME, size=reader.token))
            return
        reader.wanted = DatasetId(message.digest.hex())
        self._welcome(reader)

    def _welcome(self, reader: Reader) -> None:
        def welcome(found: Known | CacheError) -> None:
            if reader.id not in self._readers:
                return
            if isinstance(found, CacheError):
                self._write(reader, wire.encode(Op.FAILED, 0, 0, found.code, text=str(found)))
                return
            reader.dataset = found
            rooms = " ".join(map(str, self._answers.rooms()))
            self._write(reader, wire.encode(Op.WELCOME, 0, len(found.extent_ids), reader.token, text=rooms))

        self._answers.connected(reader.id, reader.wanted, welcome)

    def _drop(self, reader: Reader) -> None:
        if self._readers.pop(reader.id, None) is None:
            return
        del self._tokens[reader.token]
        self._plans.rows.leave(reader.id)
        if reader.plan is None:
            self._unwatch(reader.channel.fileno())
        else:
            self._plans.forget(reader.plan)
        self._unread.leave(reader)
        self._answers.passed_or_gone(reader.id, None)
