"""A failure of one rank is the same typed error on all of them, before a collective times out. Design, D12.

What happens, in order, when rank r cannot read its data:
1. r claims the job's failure in the store, writes it there, and waits a moment until the others have heard:
   the store may live in r itself and die with it;
2. the watch of every other rank hears of it (it asks the store twice a second) and keeps it;
3. a rank that fetches its next batch raises it, as r does, and its watch ends;
4. a rank that does not come to fetch within `peer_failure_s` is blocked in a collective that r will never
   join. It cannot raise there, so the watch logs the error and ends the process with `BLOCKED_EXIT`.

A watch lives for one iteration of one loader: until all ranks have ended theirs, so that it also guards who
waits for the others after its own last batch. All iterations after one agreement of the ranks hear of the same
failure: a rank may have begun more of them than others, who looks at a batch on one rank alone say.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from cachesvc.core.errors import CacheError, PeerRankFailed, from_code
from loader.job.agreement import Store
from loader.job.rank_drift import DriftWatch
from loader.job.topology import Topology

PEER_FAILURE_S = 30.0
"""A step may take seconds and a checkpoint some more; collectives give up after 10 minutes and more."""
BLOCKED_EXIT = PeerRankFailed.code
"""Exit code of a process that was blocked in a collective when another rank failed."""
POLL_S = 0.5
"""How often a rank asks the store: one request of 50 us."""
HEARD_S = 5.0
"""How long the rank that failed stays until the others have heard: ten polls."""
_log = logging.getLogger("cachesvc")


@dataclass(slots=True)
class Agreement:
    """What the watches of one rank's loader share, from one agreement of the ranks to the next. `name`: the same on all
    ranks, and not used before in this store. `over`: this rank has raised the failure, so nobody ends it any more.
    `drift`: where there are other ranks."""

    name: str
    drift: DriftWatch | None = None
    over: threading.Event = field(default_factory=threading.Event)
    iterations: int = 0


class RankFailureWatch:
    """Hears of other ranks' failures during one iteration, on a thread of its own."""

    def __init__(self, store: Store, topology: Topology, agreed: Agreement, peer_failure_s: float) -> None:
        self._store, self._topology, self._peer_failure_s = store, topology, peer_failure_s
        self._key, self._over = f"cachesvc/peers/{agreed.name}", agreed.over
        agreed.iterations += 1
        self._agreed, self._number = agreed, agreed.iterations
        self._ended = f"{self._key}/{agreed.iterations}/finished"
        self._finished = False
        self.failure: PeerRankFailed | None = None
        """What another rank failed with, once it is known."""
        self.handed: tuple[int, int, int] | None = None
        """The epoch, its batches so far, and those of all epochs; None before the first, and in an epoch that was broken
        off."""
        self._thread = threading.Thread(target=self._watch, name="cachesvc-peers")

    def start(self) -> None:
        """Begin to listen. On a connection of its own: a wait in another thread would hold the store's up."""
        if hasattr(self._store, "clone"):  # torch before 2.8 has none
            self._store = self._store.clone()
        self._thread.start()

    def raise_failure(self) -> None:
        """Raises PeerRankFailed when another rank has failed. From then on nobody ends this process."""
        if self.failure is not None:
            self._over.set()
            raise self.failure

    def publish(self, where: str, error: BaseException) -> PeerRankFailed:
        """Tell all ranks that this one cannot go on, and return what they all raise: the first failure."""
        self._over.set()
        code = error.code if isinstance(error, CacheError) else CacheError.code
        kind, text = _cause(error)
        told = json.dumps([self._topology.rank, where, kind, code, text])
        try:
            if self._store.add(f"{self._key}/claims", 1) == 1:
                self._store.set(f"{self._key}/failure", told)
            else:
                told = self._store.get(f"{self._key}/failure").decode()
            self._say_heard()
            self._wait_for_others()
        except RuntimeError:  # torch's DistError: the store's host is gone, and the job with it
            _log.warning("the job's store does not answer: other ranks will not hear of this failure")
        return _failure(told)

    def finish(self) -> None:
        """This rank's iteration is over; the thread ends when all ranks' are."""
        try:
            self._store.add(self._ended, 1)
        except RuntimeError:
            self._over.set()
        self._finished = True

    def _say_heard(self) -> bool:
        """Whether this is the first of this rank's iterations to hear it: the one that counts."""
        first = self._store.add(f"{self._key}/heard/{self._topology.process}", 1) == 1
        if first:
            self._store.add(f"{self._key}/heard", 1)
        return first

    def _wait_for_others(self) -> None:
        deadline = time.monotonic() + HEARD_S
        while self._store.add(f"{self._key}/heard", 0) < self._topology.processes:
            if time.monotonic() >= deadline:
                return
            time.sleep(POLL_S / 10)  # the store cannot call us

    def _watch(self) -> None:
        try:
            while not self._over.wait(POLL_S) and threading.main_thread().is_alive():
                if self._store.check([f"{self._key}/failure"]):
                    self._heard()
                    return
                self._look_for_drift()
                if self._finished and self._store.add(self._ended, 0) >= self._topology.processes:
                    return
        except RuntimeError:  # the store's host is gone; torch's own collectives say so
            _log.debug("the job's store does not answer any more")

    def _look_for_drift(self) -> None:
        drift = self._agreed.drift
        if drift is not None and self._number == self._agreed.iterations:  # the newest iteration's place
            drift.look(self._store, self.handed, time.monotonic())

    def _heard(self) -> None:
        self.failure = _failure(self._store.get(f"{self._key}/failure").decode())
        if self._say_heard():
            # Now, not when it ends: a collective whose peer has gone may break first, and say nothing of the cause.
            _log.warning("%s", self.failure)
        deadline = time.monotonic() + self._peer_failure_s
        while not self._over.wait(min(POLL_S, max(0.0, deadline - time.monotonic()))):
            if not threading.main_thread().is_alive():
                return
            if time.monotonic() >= deadline:
                _log.error(
                    "this rank did not come to its next batch within %.0f s of that, so it is blocked in a"
                    " collective: it ends with exit code %d",
                    self._peer_failure_s,
                    BLOCKED_EXIT,
                )
                os._exit(BLOCKED_EXIT)


def warn_of_state(agreed: Agreement | None) -> None:
    """Warn, where a state is saved, of another rank that is elsewhere."""
    if agreed is not None and agreed.drift is not None:
        agreed.drift.warn_of_state()


def watch_for(
    store: Store | None, topology: Topology, agreed: Agreement, peer_failure_s: float
) -> RankFailureWatch | None:
    """A watch, where there is a job to watch."""
    return None if store is None else RankFailureWatch(store, topology, agreed, peer_failure_s)


@contextmanager
def watched(watch: RankFailureWatch | None, where: Callable[[], str]) -> Iterator[None]:
    """Around one iteration: what it raises is told to all ranks, also what ends this one (`sys.exit()` in a transform) but
    for Ctrl-C, which they get too. A typed error becomes the PeerRankFailed that the others raise too; any other (of a
    transform, say) is raised as it is. Without a watch nothing happens."""
    if watch is None:
        yield
        return
    watch.start()
    try:
        yield
    except (PeerRankFailed, GeneratorExit):
        raise
    except CacheError as error:
        raise watch.publish(where(), error) from error
    except BaseException as error:
        if (
            not isinstance(error, KeyboardInterrupt) or error.args
        ):  # Ctrl-C has none; a worker's has torch's "Caught ..."
            watch.publish(where(), error)
        raise
    finally:
        watch.finish()


def _cause(error: BaseException) -> tuple[str, str]:
    """Its type and the first line that it says. What a worker raised arrives as torch's "Caught ..." around the
    worker's traceback: then those of the exception that this ends with."""
    text = str(error).strip()
    if not text.startswith("Caught ") or "\nOriginal Traceback" not in text:
        return type(error).__name__, text.partition("\n")[0]
    lines = [line for line in text.splitlines() if line.strip()]
    frames = [number for number, line in enumerate(lines) if line.startswith('  File "')]
    after = lines[frames[-1] + 1 :] if frames else lines
    line = next((line for line in after if not line.startswith(" ")), lines[-1])
    kind, _, said = line.partition(": ")
    return kind.rpartition(".")[2], said


def _failure(told: str) -> PeerRankFailed:
    rank, where, kind, code, text = json.loads(told)
    failure = PeerRankFailed(f"rank {rank} cannot go on at {where}: {kind}: {text}")
    failure.rank, failure.cause = rank, from_code(code, text)
    return failure
