"""Raises the failure of one rank as the same typed error on all ranks, before a collective times out.

The order of events when rank r cannot read its data:
1. r claims the job's failure in the store, writes it there, and waits a moment until the others have read it:
   the store's server may be in r itself and end with it;
2. the watch of every other rank polls the store twice a second, reads the failure and keeps it;
3. a rank that fetches its next batch raises it, as r does, and its watch ends;
4. a rank that does not fetch within `peer_failure_s` is blocked in a collective that r will never join. It cannot
   raise there, so the watch logs the error and ends the process with `BLOCKED_EXIT`.

A watch lasts for one iteration of one loader, until all ranks have ended theirs: so it also protects a rank that waits
for the others after its own last batch. All iterations after one agreement of the ranks share one failure, since a rank
may have begun more iterations than others (to print a batch on one rank alone, say).

A watch also compares how the ranks end its iteration. Where their epochs came apart, all ranks raise StateMismatch.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from cachesvc.core.errors import CacheError, PeerRankFailed, StateMismatch, from_code
from loader.job.rank_drift import DriftWatch, IterationEnds, RankPosition
from loader.job.store import POLL_S, JobStore, polls
from loader.job.topology import Topology

BLOCKED_EXIT = PeerRankFailed.code
"""Exit code of a process that was blocked in a collective when another rank failed."""
ACKNOWLEDGE_S = 5.0
"""How long the failed rank waits until the others have read its failure: ten polls."""
_log = logging.getLogger("cachesvc")


@dataclass(slots=True)
class Agreement:
    """The state that the watches of one rank's loader share, from one agreement of the ranks to the next. `store` is the
    part of this agreement. A step has `accumulate` batches. `over` is set once this rank has raised the failure: no watch
    ends the process after that. `iterations` have begun; `latest` is the watch of the last of them."""

    store: JobStore
    topology: Topology
    drift: DriftWatch
    accumulate: int = 1
    over: threading.Event = field(default_factory=threading.Event)
    iterations: int = 0
    latest: RankFailureWatch | None = None


class RankFailureWatch:
    """Watches for failures of other ranks during one iteration, on its own thread."""

    def __init__(self, agreed: Agreement, peer_failure_s: float) -> None:
        self._store, self._topology, self._peer_failure_s = agreed.store, agreed.topology, peer_failure_s
        self._over = agreed.over
        agreed.iterations += 1
        self._agreed = agreed
        self._previous, agreed.latest = agreed.latest, self
        self._ended = f"{agreed.iterations}/finished"
        self._finished = False
        self._ends: IterationEnds | None = IterationEnds(self._store, agreed.iterations, agreed.accumulate)
        self.failure: CacheError | None = None
        """The failure of another rank, once it is known."""
        self.handed: RankPosition | None = None
        """The position after the batches handed over so far; None before the first batch."""
        self._first = 0
        """Batches of all epochs before this iteration."""
        self.left = self.complete = False
        """The epoch was left before its last batch; all batches of the iteration were handed over."""
        self._thread = threading.Thread(target=self._watch, name="cachesvc-peers")

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def hand(self, epoch: int, turn: int, batches: int) -> None:
        """Count a batch that is handed over: the epoch's, and those of all epochs before it."""
        if self.handed is None:
            self._first = batches
        step = (turn + 1) // self._agreed.accumulate
        self.handed, self.left = RankPosition(self._topology.rank, epoch, step, batches + 1), False

    def check(self) -> None:
        """Raise, before a batch is made, the failure of another rank, and StateMismatch where epochs came apart. No watch
        ends this process after it has raised a failure."""
        if self.failure is not None:
            self._over.set()
            raise self.failure
        at, ends = self.handed, self._ends
        if at is not None and ends is not None and ends.is_due(taken := at.batches - self._first):
            with self._if_store_answers():
                ends.go_on(at, taken)

    def compare_ends(self) -> None:
        """Compare how this rank and others ended the iteration before this one, and this one once it is complete. Raises
        StateMismatch."""
        previous, self._previous = self._previous, None
        with self._if_store_answers():
            if previous is not None:
                previous._compare_end()
            if self.complete:
                self._compare_end()

    def _compare_end(self) -> None:
        ends, self._ends, at = self._ends, None, self.handed
        if ends is not None and at is not None:
            (ends.complete if self.complete else ends.leave)(at)

    @contextmanager
    def _if_store_answers(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError:  # its host is gone; torch's own collectives say so
            _log.debug("the job's store does not answer any more")

    def publish(self, where: str, error: BaseException) -> CacheError:
        """Tell all ranks that this one cannot go on. Return the error that they all raise, which names the first
        failure."""
        self._over.set()
        code = error.code if isinstance(error, CacheError) else CacheError.code
        kind, text = _cause(error)
        failure = [self._topology.rank, where, kind, code, text]
        try:
            failure = self._store.put_first("failure", failure)
            self._store.arrive("heard", self._topology.process)
            for _ in polls(ACKNOWLEDGE_S, "other ranks"):
                if self._store.count("heard") >= self._topology.processes:
                    break
        except RuntimeError:  # torch's DistError: the store's host is gone, and the job with it
            _log.warning("the job's store does not answer: other ranks are not told of this failure")
        return _failure(failure)

    def finish(self) -> None:
        """End this rank's iteration; the thread ends once all ranks have ended theirs."""
        try:
            self._store.count(self._ended, 1)
        except RuntimeError:
            self._over.set()
        self._finished = True

    def _polls(self) -> Iterator[None]:
        """Yield for each poll until this rank has raised a failure, or the program ends."""
        while not self._over.wait(POLL_S) and threading.main_thread().is_alive():
            yield

    def _watch(self) -> None:
        with self._if_store_answers():
            for _ in self._polls():
                if failure := self._store.read("failure"):
                    return self._await_fetch(_failure(failure))
                if self._agreed.latest is self:  # the newest iteration has the position
                    self._agreed.drift.update(None if self.left else self.handed, time.monotonic())
                if self._finished and self._store.count(self._ended) >= self._topology.processes:
                    return

    def _await_fetch(self, failure: CacheError) -> None:
        """Keep the failure until this rank fetches its next batch; end the process where it does not."""
        self.failure = failure
        if self._store.arrive("heard", self._topology.process):  # in the first of this rank's iterations
            # Log it now: a collective whose peer is gone may fail first, with an error that does not name the cause.
            _log.warning("%s", failure)
        deadline = time.monotonic() + self._peer_failure_s
        for _ in self._polls():
            if time.monotonic() >= deadline:
                _log.error(
                    "this rank did not fetch its next batch within %.0f s of that failure, so it is blocked in a"
                    " collective: it ends with exit code %d",
                    self._peer_failure_s,
                    BLOCKED_EXIT,
                )
                os._exit(BLOCKED_EXIT)


@contextmanager
def watched(watch: RankFailureWatch | None, where: Callable[[], str]) -> Iterator[None]:
    """Watch other ranks during one iteration, and tell them of an error that ends it (also `sys.exit()` in a transform, but
    not Ctrl-C, which they get too). A typed error becomes the PeerRankFailed that all ranks raise, and StateMismatch stays
    one; any other error (of a transform, say) is raised unchanged. Does nothing without a watch."""
    if watch is None:
        yield
        return
    watch.start()
    try:
        watch.compare_ends()
        yield
        watch.compare_ends()
    except (PeerRankFailed, GeneratorExit):
        raise
    except CacheError as error:
        if error is watch.failure:  # it has been told
            raise
        raise watch.publish(where(), error) from error
    except BaseException as error:
        if (
            not isinstance(error, KeyboardInterrupt) or error.args
        ):  # Ctrl-C has no arguments; an interrupt of a worker has torch's "Caught ..."
            watch.publish(where(), error)
        raise
    finally:
        watch.finish()


def _cause(error: BaseException) -> tuple[str, str]:
    """The type and the first line of an error. The error of a worker arrives as torch's "Caught ..." around the worker's
    traceback: then those of the exception at the end of this traceback."""
    text = str(error).strip()
    if not text.startswith("Caught ") or "\nOriginal Traceback" not in text:
        return type(error).__name__, text.partition("\n")[0]
    lines = [line for line in text.splitlines() if line.strip()]
    frames = [number for number, line in enumerate(lines) if line.startswith('  File "')]
    after = lines[frames[-1] + 1 :] if frames else lines
    line = next((line for line in after if not line.startswith(" ")), lines[-1])
    kind, _, message = line.partition(": ")
    return kind.rpartition(".")[2], message


def _failure(stored: list[Any]) -> CacheError:
    rank, where, kind, code, text = stored
    if code == StateMismatch.code:
        return StateMismatch(text)  # of the job rather than of one rank
    failure = PeerRankFailed(f"rank {rank} cannot go on at {where}: {kind}: {text}")
    failure.rank, failure.cause = rank, from_code(code, text)
    return failure
