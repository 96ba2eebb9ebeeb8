"""The reader's end of the grants socket: ask for extents, get read-only descriptors, give leases back."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from cachesvc.client import plan_memory as plans
from cachesvc.client.connection import Answer, Connection, give_back
from cachesvc.client.keepalive import leave_alone, look_after
from cachesvc.client.protocol import Granted, Refused
from cachesvc.config import GRANTS_SOCKET
from cachesvc.core import wire
from cachesvc.core.errors import CacheError, DaemonUnavailable, NotFound, OutOfSpace, from_code
from cachesvc.core.model import DatasetId
from cachesvc.core.order.epoch_order import Plan
from cachesvc.core.stalls import StallReport
from cachesvc.core.wire import Message, Op

HELLO_TIMEOUT_S = 30.0
"""A restarted daemon loads the catalog before it welcomes anyone."""


class DaemonGrants:
    """One connection to a daemon for one dataset. Made anew by the first call after it broke, or within a second of
    the daemon's return (`keepalive.py`), and then the extents still leased are held against the new daemon's budget.
    Its plan is told once a connection, before the first request or `passed`: who rests needs nothing. Safe to share
    between threads, each of which waits for its own extents alone; never across a fork: a child can only `abandon` it.
    """

    def __init__(self, directory: str, dataset: DatasetId, job: int = 0) -> None:
        """Readers of one `job` have one share of the fills; 0: this connection has a share of its own."""
        self._path = f"{directory}/{GRANTS_SOCKET}"
        self._dataset = dataset
        self._job = job
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._connection: Connection | None = None
        self._closed = False
        self._plan: Plan | None = None
        self._told = False
        self._leases: dict[int, int] = {}
        self._origins: dict[int, str] = {}
        self.token = 0
        self.rooms: Sequence[int] = ()
        """Bytes that each of the daemon's tiers may hold, as it said in its welcome."""

    @property
    def outstanding(self) -> int:
        """Requests that wait for their answers, of all threads."""
        connection = self._connection
        return 0 if connection is None else connection.outstanding

    def connect(self) -> bool:
        """Be connected to a daemon that lives, and have it hear of what is held; True when this made a new
        connection. Raises DaemonUnavailable."""
        with self._lock:
            if self._connection is not None and self._connection.lives():
                return False
            self._disconnect()
            self._connect()
            return True

    def submit(self, plan: Plan) -> None:
        """From now on extents are needed so; `passed` counts its steps. A daemon that is away, or has forgotten the
        dataset, hears it when it is back: reads will say so. Raises InvalidInput for one that is too long, OutOfSpace
        where there is no memory or descriptor for it."""
        with self._lock:
            self._plan, self._told = plan, False
            with suppress(DaemonUnavailable, NotFound):
                self.connect()
                self._announce()

    def acquire(self, extents: Sequence[int], timeout_s: float) -> list[Granted | Refused]:
        """One answer for each extent, in the order asked. Every Granted is a lease until `release`.

        Raises DaemonUnavailable when the connection is gone or cannot be made, DeadlineExceeded after
        `timeout_s`, and the typed error of a fill that failed; CacheError after `close`.
        """
        deadline, connection = time.monotonic() + timeout_s, self._connection
        made = connection is None or connection.over or self._closed
        while True:
            if made or connection is None:
                connection = self._connect()
            try:
                if not self._told:
                    self._announce()
                found = connection.ask(Op.GET, extents, deadline)
                break
            except DaemonUnavailable:
                self._check()
                if made:
                    raise
                made = True  # it broke at some time since the last request: the daemon may be back
        for answer, _ in found:
            if answer.op is Op.FAILED:
                give_back(connection, found)
                raise from_code(answer.size, answer.text)
        return self._entered(connection, found)

    def look(self) -> None:
        """See `presence.Polled`."""
        self.connect()

    def release(self, extents: Sequence[int]) -> None:
        """Give leases back, after unmapping. Without a daemon there is nothing to give back."""
        with self._lock:
            given = []
            for extent in extents:
                count = self._leases.pop(extent, 0)
                if count > 1:
                    self._leases[extent] = count - 1
                else:
                    self._origins.pop(extent, None)
                if count:
                    given.append(Message(Op.RELEASE, 0, extent))
            self._try_tell(given)

    def passed(self, step: int) -> None:
        """This reader's plan has moved on: everything before `step` has been consumed."""
        with self._lock, suppress(DaemonUnavailable):
            if not (self._told or self._connection is None or self._connection.over):
                self._announce()
            self._try_tell([Message(Op.PASSED, 0, step)])

    def suspect(self, extents: Sequence[int]) -> None:
        """What was granted of these does not match its checksums: the daemon is to check it before it grants it
        again. To be said before their release."""
        with self._lock:
            self._try_tell([Message(Op.SUSPECT, 0, extent) for extent in extents])

    def recalled(self) -> Mapping[int, bool]:
        """The extents that the daemon asked for since the last time, and whether what was granted of them is wrong; else
        others need the room."""
        with self._lock:
            connection = self._connection
        if connection is None:
            return {}
        connection.listen()
        found = [connection.recalled.popleft() for _ in range(len(connection.recalled))]
        return {each.value: each.text == wire.WRONG for each in found}

    def waited(self, report: StallReport) -> None:
        """What this rank's steps waited for; a daemon that is gone need not know."""
        with self._lock:
            self._try_tell([Message(Op.WAITED, text=report.encode())])

    def catalog(self) -> int:
        """A descriptor of the dataset's catalog (sealed, read-only); the caller closes it."""
        connection = self._connect()
        ((_, fd),) = connection.ask(Op.CATALOG, [0], time.monotonic() + HELLO_TIMEOUT_S)
        if fd is None:
            raise DaemonUnavailable(f"the daemon at {self._path} sent no catalog; look at its log")
        return fd

    def close(self) -> None:
        """End every lease and the claim on the dataset, for good: who waits for an extent raises CacheError."""
        if os.getpid() != self._process:
            self.abandon()
            return
        leave_alone(self)
        with self._lock:
            self._closed = True
            self._leases.clear()
            self._origins.clear()
            self._disconnect()

    def abandon(self) -> None:
        """In a forked child: close what was inherited; a thread of the parent may have held the lock."""
        if self._connection is not None:
            self._connection.forget()

    def _check(self) -> None:
        if self._closed:
            raise CacheError("the dataset was closed while its extents were asked for; open it again")

    def _connect(self) -> Connection:
        with self._lock:
            self._check()
            if self._connection is not None and not self._connection.over:
                return self._connection
            connection = Connection(self._path)
            try:
                self._greet(connection)
            except BaseException:
                connection.close()
                raise
            self._connection, self._told = connection, False
            self._leases = dict.fromkeys(self._leases, 1)
            look_after(self)
            return connection

    def _announce(self) -> None:
        with self._lock:
            if self._plan is not None and self._connection is not None and not self._told:
                try:
                    memory, rows, more = plans.written(self._plan)
                except OSError as error:
                    raise OutOfSpace(
                        f"no memory or descriptor for a plan ({error.strerror}); see ulimit -n"
                    ) from None
                try:
                    self._connection.tell([Message(Op.PLAN, rows, more)], memory)
                finally:
                    os.close(memory)
            self._told = True

    def _greet(self, connection: Connection) -> None:
        hello = Message(
            Op.HELLO, wire.MAGIC, self._job, wire.KNOWS_HOLES, digest=bytes.fromhex(self._dataset)
        )
        answer = connection.greet(hello, time.monotonic() + HELLO_TIMEOUT_S)
        if answer.op is Op.FAILED:
            raise from_code(answer.size, answer.text)
        self.token, self.rooms = answer.size, tuple(map(int, answer.text.split()))
        connection.tell(
            [Message(Op.HOLD, 0, extent, text=self._origins.get(extent, "")) for extent in self._leases]
        )

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _entered(self, connection: Connection, found: Sequence[Answer]) -> list[Granted | Refused]:
        """What was answered, its leases written down: unless another thread has connected anew meanwhile,
        and told the new daemon what is held without them."""
        with self._lock:
            if self._connection is not connection:
                give_back(connection, found)
                self._check()
                raise DaemonUnavailable(f"the daemon at {self._path} was started again meanwhile; ask again")
            answers: list[Granted | Refused] = []
            for answer, fd in found:
                extent = answer.value
                if fd is None:
                    answers.append(Refused(extent))
                    continue
                tier, stay, *way = answer.text.split(" ")
                origin = tier.rstrip("0123456789")
                self._leases[extent] = self._leases.get(extent, 0) + 1
                self._origins[extent] = origin
                brief, once = stay != "kept", stay == "once"
                holes = next((each for each in way if each.startswith(wire.HOLES)), "")
                peer, holes = "peer" in way, holes.removeprefix(wire.HOLES)
                answers.append(Granted(extent, fd, 0, answer.size, origin, brief, once, peer, holes))
            return answers

    def _try_tell(self, messages: Sequence[Message]) -> None:
        """Send what a daemon that is gone need not hear."""
        if messages and self._connection is not None:
            with suppress(DaemonUnavailable):
                self._connection.tell(messages)
