"""The reader's end of the grants socket: request extents, receive read-only descriptors, release leases."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from cachesvc.catalog.catalog import Catalog
from cachesvc.client import plan_memory
from cachesvc.client.connection import Answer, Connection, release_answers
from cachesvc.client.keepalive import start_polling, stop_polling
from cachesvc.client.protocol import CLOSED, Granted, Refused
from cachesvc.config import GRANTS_SOCKET
from cachesvc.core import wire
from cachesvc.core.errors import (
    CacheError,
    DaemonUnavailable,
    NotAllowed,
    NotFound,
    OutOfSpace,
    SourceChanged,
    from_code,
)
from cachesvc.core.limits import HELLO_S
from cachesvc.core.model import DatasetId
from cachesvc.core.order.epoch_order import Plan
from cachesvc.core.stalls import StallReport
from cachesvc.core.wire import Message, Op
from cachesvc.system.descriptors import closing_fd


class DaemonGrants:
    """One connection to a daemon for one dataset. A broken connection is replaced by the next call, or within a second
    of the daemon's return (`keepalive.py`), and then the extents still leased count against the new daemon's budget. The
    plan is sent once per connection, before the first request or `passed`: an idle reader needs nothing fetched. Safe
    to share between threads: each waits for its own extents alone. Not safe across a fork: a child can only `abandon`
    it.
    """

    def __init__(
        self, directory: str, dataset: DatasetId, job: int = 0, claims: bool = True, fetches: bool = True
    ) -> None:
        """`directory` holds the daemon's sockets. Readers of one `job` have one share of the fills; with 0 this
        connection has its own share. One that claims nothing has the daemon keep nothing for it. One that fetches
        nothing is refused what is not resident."""
        self._path = f"{directory}/{GRANTS_SOCKET}"
        self._dataset = dataset
        self._job = job
        self._features = wire.KNOWS_HOLES
        self._features |= 0 if claims else wire.CLAIMS_NOTHING
        self._features |= 0 if fetches else wire.RESIDENT_ONLY
        self._process = os.getpid()
        self._lock, self._opening = threading.RLock(), threading.Lock()
        self._open_again: Callable[[], None] | None = None
        self._may_open: Callable[[], bool] = lambda: True
        self._refusal: CacheError | None = None
        self._connection: Connection | None = None
        self._closed = False
        self._plan: Plan | None = None
        self._plan_sent = False
        self._leases: dict[int, int] = {}
        self._origins: dict[int, str] = {}
        self.token = 0
        """The daemon's token for the connection."""
        self._takes_buckets = False
        self.tier_budgets: Sequence[int] = ()
        """Bytes that each of the daemon's tiers may hold, as of its welcome."""

    @property
    def outstanding(self) -> int:
        """Requests of all threads that wait for their answers."""
        connection = self._connection
        return 0 if connection is None else connection.outstanding

    def opens_again(
        self, open_again: Callable[[], None], may_open: Callable[[], bool] = lambda: True
    ) -> None:
        """Open the dataset again in a daemon that was started without it (another state directory, a new disk), within a
        second also while nothing is read. `open_again()` has the daemon compile the same version once more; `may_open()`
        says whether this process may: forked workers never call gRPC, and wait for the trainer, or read directly."""
        self._open_again, self._may_open = open_again, may_open
        start_polling(self)

    def connect(self) -> bool:
        """Connect to a live daemon, and report the extents still leased to it; True when this made a new connection.
        Raises DaemonUnavailable, NotFound for a dataset that the daemon does not know, and what opening it again raises:
        SourceChanged where the source has another version by now."""
        with self._opening:
            try:
                return self._connect_anew()
            except NotFound as error:
                if self._open_again is None:
                    raise
                if not self._may_open():
                    raise DaemonUnavailable(f"{error}: the trainer does that for its workers") from None
            if self._refusal is not None:  # do not list the source again at each poll
                raise self._refusal.with_traceback(None)
            try:
                self._open_again()
            except (NotFound, NotAllowed, SourceChanged) as error:
                self._refusal = error
                raise
            return self._connect_anew()

    def submit(self, plan: Plan) -> None:
        """Replace this reader's plan of needs; `passed` counts its steps. A daemon that is away, or has forgotten the
        dataset, receives it on the next connection. Raises InvalidInput for a plan that is too long, OutOfSpace without
        memory or a descriptor for it."""
        with self._lock:
            self._plan, self._plan_sent = plan, False
            with suppress(DaemonUnavailable, NotFound):
                self._connect_anew()
                self._send_plan()

    def acquire(self, extents: Sequence[int], timeout_s: float) -> list[Granted | Refused]:
        """See `Grants`; the answers are in the order of `extents`. Raises DaemonUnavailable when the connection breaks
        twice or cannot be made, CacheError after `close`, and what `connect` raises."""
        before = self.token
        try:
            return self._acquire(extents, timeout_s)
        except NotFound:
            self.connect()
            if self.token == before:
                raise  # on the same connection, NotFound is about an object of the source
        return self._acquire(extents, timeout_s)

    def _acquire(self, extents: Sequence[int], timeout_s: float) -> list[Granted | Refused]:
        deadline, connection = time.monotonic() + timeout_s, self._connection
        retried = connection is None or connection.ended or self._closed
        while True:
            if retried or connection is None:
                connection = self._connect()
            try:
                if not self._plan_sent:
                    self._send_plan()
                answers = connection.request(Op.GET, extents, deadline)
                break
            except DaemonUnavailable:
                self._check_open()
                if retried:
                    raise
                retried = True  # the connection broke since the last request: the daemon may be back
        for answer, _ in answers:
            if answer.op is Op.FAILED:
                release_answers(connection, answers)
                raise from_code(answer.size, answer.text)
        return self._record(connection, answers)

    def poll(self) -> None:
        """Connect again where the connection broke. See `Polled`."""
        self.connect()

    def release(self, extents: Sequence[int]) -> None:
        """See `Grants`; without a daemon there is nothing to release."""
        with self._lock:
            released = []
            for extent in extents:
                count = self._leases.pop(extent, 0)
                if count > 1:
                    self._leases[extent] = count - 1
                else:
                    self._origins.pop(extent, None)
                if count:
                    released.append(Message(Op.RELEASE, 0, extent))
            self._send_if_connected(released)

    def passed(self, step: int) -> None:
        """See `Grants`."""
        with self._lock, suppress(DaemonUnavailable):
            if not (self._plan_sent or self._connection is None or self._connection.ended):
                self._send_plan()
            self._send_if_connected([Message(Op.PASSED, 0, step)])

    def suspect(self, extents: Sequence[int]) -> None:
        """Report extents whose bytes did not match their checksums: the daemon checks them before it grants them again.
        Call this before their release."""
        with self._lock:
            self._send_if_connected([Message(Op.SUSPECT, 0, extent) for extent in extents])

    def recalled(self) -> Mapping[int, bool]:
        """The extents that the daemon recalled since the last call: True for a corrupt copy, False where others need the
        room."""
        with self._lock:
            connection = self._connection
        if connection is None:
            return {}
        connection.read_pending()
        extents = [connection.recalled.popleft() for _ in range(len(connection.recalled))]
        return {each.value: each.text == wire.WRONG for each in extents}

    def waited(self, report: StallReport) -> None:
        """Report the waits of this rank's steps, for the daemon's metrics; dropped while the daemon is away."""
        with self._lock:
            self._send_if_connected([Message(Op.WAITED, text=report.encode(self._takes_buckets))])

    def catalog(self) -> int:
        """A descriptor of the dataset's catalog (sealed, read-only), which the caller closes. Raises as `connect`."""
        connection = self._connect()
        ((_, fd),) = connection.request(Op.CATALOG, [0], time.monotonic() + HELLO_S)
        if fd is None:
            raise DaemonUnavailable(f"the daemon at {self._path} sent no catalog; look at its log")
        return fd

    def open_catalog(self) -> Catalog:
        """Map the dataset's catalog. Raises as `connect`."""
        with closing_fd(self.catalog()) as fd:
            return Catalog.open(f"/proc/self/fd/{fd}")

    def close(self) -> None:
        """End every lease and the claim on the dataset, for good: a thread that waits for an extent raises CacheError."""
        if os.getpid() != self._process:
            self.abandon()
            return
        stop_polling(self)
        with self._lock:
            self._closed = True
            self._leases.clear()
            self._origins.clear()
            self._disconnect()

    def abandon(self) -> None:
        """Close inherited descriptors in a forked child, without the lock, which a thread of the parent may have held."""
        if self._connection is not None:
            self._connection.abandon()

    # ---- inside

    def _connect_anew(self) -> bool:
        with self._lock:
            if self._connection is not None and self._connection.is_alive():
                return False
            self._disconnect()
            self._connect()
            return True

    def _check_open(self) -> None:
        if self._closed:
            raise CacheError(CLOSED)

    def _connect(self) -> Connection:
        with self._lock:
            self._check_open()
            if self._connection is not None and not self._connection.ended:
                return self._connection
            connection = Connection(self._path)
            try:
                self._greet(connection)
            except BaseException:
                connection.close()
                raise
            self._connection, self._plan_sent = connection, False
            self._leases = dict.fromkeys(self._leases, 1)
            start_polling(self)
            return connection

    def _send_plan(self) -> None:
        with self._lock:
            if self._plan is not None and self._connection is not None and not self._plan_sent:
                try:
                    memory, rows, more = plan_memory.write(self._plan)
                except OSError as error:
                    raise OutOfSpace(
                        f"no memory or descriptor for a plan ({error.strerror}); see ulimit -n"
                    ) from None
                with closing_fd(memory):
                    text = wire.LOCAL if self._plan.local else ""
                    self._connection.send([Message(Op.PLAN, rows, more, text=text)], memory)
            self._plan_sent = True

    def _greet(self, connection: Connection) -> None:
        hello = Message(Op.HELLO, wire.MAGIC, self._job, self._features, digest=bytes.fromhex(self._dataset))
        answer = connection.greet(hello, time.monotonic() + HELLO_S)
        if answer.op is Op.FAILED:
            raise from_code(answer.size, answer.text)
        self._takes_buckets = answer.digest == wire.STEP_BUCKETS
        self.token, self.tier_budgets = answer.size, tuple(map(int, answer.text.split()))
        connection.send(
            [Message(Op.HOLD, 0, extent, text=self._origins.get(extent, "")) for extent in self._leases]
        )

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _record(self, connection: Connection, found: Sequence[Answer]) -> list[Granted | Refused]:
        """Record the leases of answers. Raises DaemonUnavailable where another thread has connected anew meanwhile: the
        new daemon was told of the leases without these."""
        with self._lock:
            if self._connection is not connection:
                release_answers(connection, found)
                self._check_open()
                raise DaemonUnavailable(f"the daemon at {self._path} was restarted meanwhile; try again")
            answers: list[Granted | Refused] = []
            for answer, fd in found:
                extent = answer.value
                if fd is None:
                    answers.append(Refused(extent))
                    continue
                tier, stay, *more = answer.text.split(" ")
                origin = tier.rstrip("0123456789")
                self._leases[extent] = self._leases.get(extent, 0) + 1
                self._origins[extent] = origin
                streaming, once = stay != "kept", stay == "once"
                holes = next((each for each in more if each.startswith(wire.HOLES)), "")
                peer, holes = "peer" in more, holes.removeprefix(wire.HOLES)
                content = answer.digest if answer.digest != wire.NO_DATASET else b""
                answers.append(
                    Granted(extent, fd, 0, answer.size, origin, streaming, once, peer, holes, content)
                )
            return answers

    def _send_if_connected(self, messages: Sequence[Message]) -> None:
        """Send messages that a daemon which is gone does not need."""
        if messages and self._connection is not None:
            with suppress(DaemonUnavailable):
                self._connection.send(messages)
