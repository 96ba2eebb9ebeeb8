"""The prefetches of this node: those that a caller waits for, and detached ones, which go on without it.

A detached prefetch runs on a thread of its own. It is in a file until it ends, so the next daemon goes on with it.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from cachesvc.core.errors import Busy, CacheError, DaemonUnavailable, InvalidInput, NotFound, OutOfSpace
from cachesvc.core.model import DatasetId
from cachesvc.daemon.access.tenants import NO_USER, Peer, is_own_user
from cachesvc.daemon.control.prefetches import Prefetches
from cachesvc.daemon.control.state_file import StateFile
from cachesvc.daemon.datasets import Datasets, ServedDataset
from cachesvc.daemon.events.event import Event, record
from cachesvc.daemon.loop.loop import Loop
from cachesvc.daemon.loop.waiting import Caller
from cachesvc.v1 import cachesvc_pb2 as pb

log = logging.getLogger(__name__)
MOST = 64
"""Detached prefetches under way."""
ENDED = 64
"""Prefetches that ended and are still listed."""
CANCELLED = "it was ended with `cachesvc cancel`"


@dataclass(eq=False)
class Run:
    """A prefetch. `caller`: who waits for it; None for a detached one."""

    id: str
    dataset: DatasetId
    uri: str
    uid: int
    caller: Caller | None = None
    started: float = field(default_factory=time.time)
    state: str = "running"
    why: str = ""
    progress: pb.PrefetchReply = field(default_factory=pb.PrefetchReply)
    cancelled: bool = False

    def is_active(self) -> bool:
        """Tell whether it is to go on."""
        return not self.cancelled and (self.caller is None or self.caller.is_active())

    def message(self) -> pb.PrefetchStatus:
        """Return what is shown of it."""
        return pb.PrefetchStatus(
            id=self.id,
            dataset=self.dataset,
            uri=self.uri,
            uid=self.uid,
            started=self.started,
            detached=self.caller is None,
            state=self.state,
            why=self.why,
            progress=self.progress,
        )


class PrefetchRuns:
    """Safe from any thread."""

    def __init__(self, path: str, prefetches: Prefetches, datasets: Datasets, loop: Loop) -> None:
        self._file, self._prefetches = StateFile(path), prefetches
        self._datasets, self._loop = datasets, loop
        self._lock, self._runs = threading.Lock(), dict[str, Run]()

    def restore(self) -> None:
        """Go on with the detached prefetches of the daemon before this one."""
        try:
            stored = self._file.read()
        except OSError as error:
            log.error("detached prefetches cannot be read", extra={"error": error.strerror})
            return
        for each, (dataset, uri, uid, started) in stored.items():
            self._start(Run(each, DatasetId(dataset), uri, uid, started=started))

    def attached(
        self, dataset: ServedDataset, user: int, dry_run: bool, caller: Caller
    ) -> Iterator[pb.PrefetchReply]:
        """Yield the progress of a prefetch for a caller that waits. Raises as `Prefetches.run`, and CacheError when a user
        ends it."""
        if dry_run:
            yield from self._prefetches.run(dataset, user, True, caller)
            return
        run = Run(self._new_id(), dataset.id, dataset.catalog.uri, user, caller)
        self._add(run)
        try:
            for reply in self._prefetches.run(dataset, user, False, run):
                run.progress = reply
                yield reply
            if run.cancelled:
                raise CacheError(CANCELLED)
        finally:
            self._end(run)

    def start(self, dataset: ServedDataset, user: int, wanted: str = "") -> str:
        """Begin a detached prefetch; return its id. Raises Busy, InvalidInput for an id that is in use, OutOfSpace where it
        cannot be written down."""
        run = Run(wanted or self._new_id(), dataset.id, dataset.catalog.uri, user)
        with self._lock:
            running = [each for each in self._runs.values() if each.state == "running"]
            if run.id in self._runs or not run.id.isalnum() or len(run.id) > 32:
                raise InvalidInput(f"{run.id!r} cannot be the id of another prefetch")
            if sum(each.caller is None for each in running) >= MOST:
                raise Busy(f"{MOST} detached prefetches are under way; cancel some")
            self._runs[run.id] = run
        try:
            with self._file.changed() as stored:
                stored[run.id] = (run.dataset, run.uri, run.uid, run.started)
        except OSError as error:
            del self._runs[run.id]
            raise OutOfSpace(f"{self._file.path} cannot be rewritten ({error.strerror})") from None
        self._start(run)
        return run.id

    def listed(self, caller: Peer | None) -> list[pb.PrefetchStatus]:
        """Return the prefetches that a caller may see, the oldest first."""
        with self._lock:
            found = [each for each in self._runs.values() if _may_see(each, caller)]
        return [each.message() for each in sorted(found, key=lambda each: each.started)]

    def cancel(self, wanted: str, caller: Peer | None) -> None:
        """End a prefetch. Raises NotFound where the caller has none of that id under way."""
        with self._lock:
            run = self._runs.get(wanted)
        if run is None or not _may_see(run, caller) or run.state != "running":
            raise NotFound(f"no prefetch {wanted!r} is under way; see `cachesvc prefetches`")
        run.cancelled = True

    def _new_id(self) -> str:
        return secrets.token_hex(4)

    def _add(self, run: Run) -> None:
        with self._lock:
            self._runs[run.id] = run
            ended = [each for each in self._runs.values() if each.state != "running"]
            for each in ended[:-ENDED]:
                del self._runs[each.id]

    def _start(self, run: Run) -> None:
        self._add(run)
        threading.Thread(target=self._work, args=(run,), name="prefetch", daemon=True).start()

    def _work(self, run: Run) -> None:
        """Fill until all is done or the daemon stops, which leaves the prefetch to the next one."""
        try:
            loaded = self._datasets.load(run.dataset).result()
            dataset = self._loop.call(lambda: self._datasets.admit(loaded))
            for reply in self._prefetches.run(dataset, run.uid, False, run):
                run.progress = reply
        except DaemonUnavailable:
            if self._loop.ended:
                return
            run.why = "the daemon could not go on with it"
        except CacheError as error:
            run.why = str(error)
        self._end(run)
        filled_bytes, uid = run.progress.resident_bytes, max(NO_USER, run.uid)
        record(
            Event(
                "prefetched", uid=uid, uri=run.uri, dataset=run.dataset, size_bytes=filled_bytes, why=run.why
            )
        )
        try:
            with self._file.changed() as stored:
                stored.pop(run.id, None)
        except OSError as error:
            log.error("a prefetch that ended cannot be struck out", extra={"error": error.strerror})

    def _end(self, run: Run) -> None:
        reply = run.progress
        if run.cancelled:
            run.state, run.why = "ended", CANCELLED
            return
        run.why = run.why or _lack(reply)
        whole = reply.done and not run.why
        gone = run.caller is not None and not run.caller.is_active() and not reply.done
        run.state = "done" if whole else "ended" if gone else "failed"


def _lack(reply: pb.PrefetchReply) -> str:
    """Say why not all of a dataset is resident; "" where it is, or is under way."""
    if reply.failures:
        return reply.failures[0].message
    return f"{reply.unfit_bytes:,} bytes have no room" if reply.done and reply.unfit_bytes else ""


def _may_see(run: Run, caller: Peer | None) -> bool:
    return is_own_user(caller) or (caller is not None and caller.uid == run.uid)
