"""Ranks of one job, each on a node of its own, that read epochs by plan and keep a ledger.

A rank is a thread with the client of a daemon: it submits the plan of each epoch, takes its extents in the order of the
plan, digests their bytes and reports its steps, as the loader does. A node that is away is waited for.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field

import numpy as np
from xxhash import xxh3_64_intdigest

from cachesvc.client.control import Control
from cachesvc.client.grants import DaemonGrants
from cachesvc.client.protocol import Granted
from cachesvc.core.errors import DaemonUnavailable, DeadlineExceeded, NotFound
from cachesvc.core.model import DatasetId
from cachesvc.core.order.epoch_order import EpochOrder, OrderSpec, Plan
from testbed.node import Daemon
from testbed.records import Records

STEP_LIMIT_S = 180.0
"""The time limit of one step: a node may be killed, start again and find its source slow."""
ASK_S = 10.0
"""The time limit of one request; the rank asks again."""
PAUSE_S = 0.05


@dataclass(frozen=True, slots=True)
class Step:
    """One extent that a rank read, with the XXH3 of its bytes and the seconds that it took."""

    rank: int
    epoch: int
    extent: int
    digest: int
    took_s: float


@dataclass
class Ledger:
    """All steps of all ranks. `errors`: what ended a rank."""

    records: Records
    steps: list[Step] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def faults(self, epochs: int) -> list[str]:
        """Errors, wrong bytes, and those of the first `epochs` that did not name each extent exactly once."""
        found = list(self.errors)
        found += [
            f"wrong bytes: {step}" for step in self.steps if step.digest != self.records.digests[step.extent]
        ]
        for epoch in range(epochs):
            read = sorted(step.extent for step in self.steps if step.epoch == epoch)
            if read != list(range(len(self.records.digests))):
                found.append(f"epoch {epoch}: {len(read)} reads of {len(set(read))} extents")
        return found

    @property
    def longest(self) -> Step:
        """The step that took longest."""
        return max(self.steps, key=lambda step: step.took_s)


class Ranks:
    """Rank i reads from `nodes[i]`. The number of extents is a multiple of the ranks."""

    def __init__(self, nodes: Sequence[Daemon], records: Records, seed: int = 1) -> None:
        self._nodes, self._records = nodes, records
        self._first = np.arange(len(records.digests) + 1, dtype=np.int64)
        self._spec = OrderSpec(seed, len(nodes), window_extents=1, canonical_nodes=len(nodes), last="error")
        self.ledger = Ledger(records)
        self.epochs = 0
        """Epochs that all ranks have read."""
        self._stopped = self._ending = False

    def stop(self) -> None:
        """End all ranks after their epoch."""
        self._stopped = True

    def read(
        self,
        epochs: int,
        between: Callable[[int], None] = lambda _: None,
        pace: Callable[[], object] = lambda: None,
    ) -> Ledger:
        """Read epochs; return the ledger. All ranks meet after each epoch, where `between(epoch)` is called once.
        A rank calls `pace` before each extent, as a training step that takes time."""
        numbers = iter(range(epochs))

        def meet() -> None:
            self.epochs += 1
            between(next(numbers))
            self._ending = self._stopped

        meeting = threading.Barrier(len(self._nodes), meet)
        threads = [
            threading.Thread(target=self._run, args=(rank, epochs, meeting, pace))
            for rank in range(len(self._nodes))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return self.ledger

    def _run(self, rank: int, epochs: int, meeting: threading.Barrier, pace: Callable[[], object]) -> None:
        try:
            dataset = _opened(self._nodes[rank], self._records)
            with closing(DaemonGrants(self._nodes[rank].socket_dir, dataset)) as grants:
                for epoch in range(epochs):
                    self._epoch(rank, epoch, epoch + 1 < epochs, grants, pace)
                    meeting.wait()
                    if self._ending:
                        return
        except threading.BrokenBarrierError:
            pass  # another rank's error is in the ledger
        except Exception as error:  # noqa: BLE001  (the ledger reports it, and the others end)
            self.ledger.errors.append(f"rank {rank}: {type(error).__name__}: {error}")
            meeting.abort()

    def _epoch(
        self, rank: int, epoch: int, more: bool, grants: DaemonGrants, pace: Callable[[], object]
    ) -> None:
        """Read one epoch of a rank. The next epoch's plan, where there is one, is known."""
        extents = self._extents(rank, epoch)
        steps = np.arange(len(extents))
        following = self._extents(rank, epoch + 1) if more else None
        grants.submit(Plan(extents, steps, steps, following))
        for number, extent in enumerate(extents.tolist()):
            pace()
            began = time.monotonic()
            digest = self._read(rank, extent, grants, began + STEP_LIMIT_S)
            grants.passed(number + 1)
            self.ledger.steps.append(Step(rank, epoch, extent, digest, time.monotonic() - began))

    def _extents(self, rank: int, epoch: int) -> np.ndarray:
        order = EpochOrder(self._spec, self._first, epoch)
        return order.slots(0, order.full_steps, rank, rank + 1)[:, 0]

    def _read(self, rank: int, extent: int, grants: DaemonGrants, deadline: float) -> int:
        """The digest of an extent's bytes. Asks again while the node is away or has no room. Raises DeadlineExceeded."""
        why = "the node has no room"
        while time.monotonic() < deadline:
            try:
                (answer,) = grants.acquire([extent], ASK_S)
                if isinstance(answer, Granted):
                    return _digest(grants, answer)
            except NotFound:  # the node came back without its state
                _opened(self._nodes[rank], self._records)
            except (DaemonUnavailable, DeadlineExceeded) as error:
                why = str(error)
            time.sleep(PAUSE_S)
        raise DeadlineExceeded(f"extent {extent} was not granted in {STEP_LIMIT_S:.0f} s: {why}")


def _digest(grants: DaemonGrants, granted: Granted) -> int:
    try:
        return xxh3_64_intdigest(os.pread(granted.fd, granted.size_bytes, granted.offset))
    finally:
        os.close(granted.fd)
        grants.release([granted.extent])


def _opened(node: Daemon, records: Records) -> DatasetId:
    """Open the dataset, as soon as the node answers."""
    deadline = time.monotonic() + STEP_LIMIT_S
    while True:
        try:
            with Control(node.socket_dir) as control:
                return control.open_dataset([records.uri], records.options).id
        except (DaemonUnavailable, DeadlineExceeded):
            if time.monotonic() > deadline:
                raise
        time.sleep(PAUSE_S)
