"""Extents that this node takes over from a node that leaves, into room that nothing else is kept in."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from cachesvc.core import events
from cachesvc.core.errors import NotFound
from cachesvc.core.model import DatasetId
from cachesvc.daemon.access.tenants import NO_USER
from cachesvc.daemon.claims import DatasetClaims
from cachesvc.daemon.datasets import Datasets, ServedDataset
from cachesvc.daemon.loop.loop import Loop
from cachesvc.daemon.peers.messages import ExtentsTaken, TakeExtents
from cachesvc.daemon.runner import Runner

NO_ROOM, COMING, HELD, LATER = range(4)
IDLE_S = 30.0
"""A claim for extents that are taken over ends so long after the last question about them."""
TICK_S = 5.0


class TakenExtents:
    """A timer of the runner. Runs on the loop's thread. Claims a dataset while its extents come, so that they are kept."""

    def __init__(self, runner: Runner, loop: Loop, datasets: Datasets, claims: DatasetClaims) -> None:
        self._runner, self._loop, self._datasets, self._claims = runner, loop, datasets, claims
        self._jobs: dict[DatasetId, tuple[int, float]] = {}
        self._tick_at = 0.0
        runner.timers.append(self)

    def take(self, wanted: TakeExtents, send: Callable[[ExtentsTaken], object]) -> None:
        """Fetch extents that are not here, and send what becomes of each: none of them where the dataset is not known."""
        if (known := self._datasets.known(DatasetId(wanted.dataset))) is not None:
            send(self._taken(wanted, known))
            return

        def loaded(done: Future[ServedDataset]) -> None:
            error = done.exception()
            if error is None:
                dataset = self._datasets.admit(done.result())
                send(self._taken(wanted, dataset))
            else:
                send(ExtentsTaken(wanted.number, unknown=isinstance(error, NotFound)))

        loading = self._datasets.load(DatasetId(wanted.dataset))
        loading.add_done_callback(lambda done: self._loop.post(partial(loaded, done)))

    def next_deadline(self) -> float:
        """See `Timer`."""
        return self._tick_at if self._jobs else math.inf

    def tick(self) -> None:
        """End claims of which nobody asks any more."""
        now = time.monotonic()
        self._tick_at = now + TICK_S
        for dataset, (job, asked_at) in list(self._jobs.items()):
            if now - asked_at > IDLE_S:
                del self._jobs[dataset]
                self._runner.handle(events.JobEnded(job))

    def _taken(self, wanted: TakeExtents, dataset: ServedDataset) -> ExtentsTaken:
        job, _ = self._jobs.get(dataset.id, (0, 0.0))
        if not job:
            job = self._claims.next_id()
            self._claims.declare(job, dataset, NO_USER, gradual=True)
        self._jobs[dataset.id] = (job, time.monotonic())
        node = self._runner.node
        if not node.claims.claimed(dataset.id):
            return ExtentsTaken(wanted.number, bytes([LATER]) * len(wanted.extents))
        taken = bytearray()
        for extent in wanted.extents:
            if node.where(extent) is None and not node.will_keep(extent) and not node.keeping.full:
                self._runner.handle(events.PeerWants(extent, handed_on=True))
            here, coming = node.where(extent) is not None, node.will_keep(extent)
            taken.append(HELD if here else COMING if coming else LATER if node.keeping.full else NO_ROOM)
        return ExtentsTaken(wanted.number, bytes(taken))
