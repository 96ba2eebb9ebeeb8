"""A simulated reader of a training job: one rank, with the loader's rules for demands, releases and retries."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from cachesvc.core import events as ev
from cachesvc.core.errors import CacheError
from cachesvc.core.model import DatasetId, ExtentId, ReaderId, Stay
from cachesvc.simulate.holding import Holding
from cachesvc.simulate.trace import EpochTrace, trace

if TYPE_CHECKING:
    from cachesvc.simulate.simulated_node import SimulatedNode

DATASET = DatasetId("simulated")
PAUSE_S = 0.02
"""The loader's pause before a reader that was refused everything asks again."""
ROOM_TIMEOUT_S = 30.0
"""The loader's timeout for room."""


class Rank:
    """One reader: it demands what a batch touches and it does not hold, computes, and goes on."""

    def __init__(self, node: SimulatedNode, number: int) -> None:
        self._node, self._number = node, number
        self._epoch = self._step = self._request = 0
        self._trace: EpochTrace = EpochTrace((), ())
        self._holding = Holding[int]()
        self._wanted: set[int] = set()
        self._refused: set[int] = set()
        self._demanded_at = 0.0
        self._reading = False

    def begin(self) -> None:
        """Start an epoch: declare the dataset, submit the plan, read."""
        node, work = self._node, self._node.workload
        self._trace = trace(work, self._epoch, self._number - 1)
        self._step = 0
        node.epochs.meter(self._epoch).touched |= self._trace.touched
        if node.spec.declared:
            if self._epoch == 0:
                extents = tuple((work.extent(index), work.shard_bytes) for index in range(work.shards))
                node.send(ev.DatasetDeclared(self._number, DATASET, extents))
            rows = tuple((work.extent(index), first, last) for index, first, last in self._trace.plan)
            node.send(ev.Planned(self._number, self._number, rows, self._following()))
        self._read()

    def _following(self) -> tuple[ExtentId, ...]:
        """The order of the next epoch, as the loader knows it too."""
        work = self._node.workload
        if self._epoch + 1 >= work.epochs:
            return ()
        rows = trace(work, self._epoch + 1, self._number - 1).plan
        return tuple(work.extent(index) for index, _, _ in rows)

    def waits_for(self, extent: ExtentId) -> bool:
        """Return whether this reader waits for an extent."""
        return self._node.index[extent] in self._wanted

    def granted(self, extent: ExtentId, stay: Stay) -> None:
        index = self._node.index[extent]
        self._node.read(extent)
        self._wanted.remove(index)
        self._holding.granted(index, stay)
        self._answered()

    def recalled(self, extent: ExtentId) -> None:
        """Handle a recall, some time after it was sent."""
        reading = self._trace.steps[self._step] if self._reading else ()
        self._release(self._holding.recalled(self._node.index[extent], reading))

    def refused(self, extent: ExtentId) -> None:
        index = self._node.index[extent]
        self._wanted.remove(index)
        self._refused.add(index)
        self._answered()

    def _read(self) -> None:
        self._demanded_at = self._node.clock.now
        self._reading = True
        self._demand(set(self._trace.steps[self._step]) - self._holding.held)

    def _demand(self, wanted: set[int]) -> None:
        """Demand all at once, as the loader does. The answers may come before this returns."""
        work = self._node.workload
        self._wanted, self._refused = set(wanted), set()
        for index in sorted(wanted):
            self._request += 1
            self._node.send(
                ev.Demanded(ReaderId(self._number), self._request, work.extent(index), True, work.shard_bytes)
            )
        if not wanted:
            self._node.clock.after(0.0, self._compute)

    def _answered(self) -> None:
        if self._wanted:
            return
        if not self._refused:
            self._node.clock.after(0.0, self._compute)
            return
        # as the loader does under pressure: copy out what came, release it all, demand the rest
        refused, held = self._refused, self._holding.held
        if not held and self._node.clock.now - self._demanded_at > ROOM_TIMEOUT_S:
            raise CacheError(f"reader {self._number} was refused everything for {ROOM_TIMEOUT_S:.0f} s")
        pause_s = 0.0 if held else PAUSE_S
        self._node.clock.after(pause_s, lambda: self._retry(refused))

    def _retry(self, refused: set[int]) -> None:
        self._release(self._holding.refused())
        self._demand(refused)

    def _compute(self) -> None:
        node = self._node
        self._reading = False
        self._release(self._holding.read(self._trace.steps[self._step]))
        node.epochs.meter(self._epoch).stall_s += node.clock.now - self._demanded_at
        node.clock.after(node.spec.step_s, self._next)

    def _next(self) -> None:
        node = self._node
        self._step += 1
        if node.spec.declared:
            node.send(ev.Passed(self._number, self._step))
        node.epochs.arrive(self._go_on)

    def _go_on(self) -> None:
        node = self._node
        if self._step < len(self._trace.steps):
            self._read()
            return
        node.epochs.ended(self._epoch)
        self._epoch += 1
        if self._epoch < node.workload.epochs:
            self.begin()

    def _release(self, indices: Iterable[int]) -> None:
        for index in sorted(indices):
            self._node.send(ev.Released(ReaderId(self._number), self._node.workload.extent(index)))
