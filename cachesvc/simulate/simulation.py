"""The real core under a virtual clock: commands are carried out after the time that they would take.

All randomness comes from one seed, so the same run gives the same trace. A failure names the workload that repeats it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from cachesvc.core import commands as cmd
from cachesvc.core import events as ev
from cachesvc.core.errors import CacheError, SourceUnavailable
from cachesvc.core.model import RAM, DatasetId, ExtentId, ReaderId, Stay, TierName
from cachesvc.core.node.node import Node
from cachesvc.core.tiering.policy import NodeSettings, TierSpec
from cachesvc.simulate.clock import Clock
from cachesvc.simulate.holding import RECALL_DELAY_S, Holding
from cachesvc.simulate.measure import EpochResult, Meter
from cachesvc.simulate.simulated_source import SimulatedSource, SourceSpec
from cachesvc.simulate.trace import EpochTrace, Workload, trace

DATASET = DatasetId("simulated")
EVICT_S = 0.0002
"""Unlinking a file or closing a memfd."""
COMMIT_S = 0.005
"""fsync, rename and an index row."""
LOCAL_BYTES_PER_S = 2e9
"""Copying from a lower tier: one NVMe drive."""
PAUSE_S = 0.02
"""The loader's pause before a reader that was refused everything asks again."""
ROOM_TIMEOUT_S = 30.0
"""The loader's timeout for room."""
MAX_EVENTS = 50_000_000


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """The simulated node: the budgets of the tiers, the core's settings, the source, and the compute time of a step."""

    tiers: tuple[TierSpec, ...]
    settings: NodeSettings = field(default_factory=NodeSettings)
    source: SourceSpec = field(default_factory=SourceSpec)
    step_s: float = 0.05
    declared: bool = True
    """False: no job declares the dataset, and there are no plans."""
    check_every: int = 0
    """Assert every invariant of the core after so many events; 0: never, for it costs O(extents)."""


class Simulation:
    """One node, its source and the ranks of one job."""

    def __init__(self, spec: NodeSpec, workload: Workload) -> None:
        self.spec, self.workload = spec, workload
        self.clock = Clock()
        self.node = Node(spec.tiers, spec.settings)
        self.results: list[EpochResult] = []
        self.log: list[tuple[float, cmd.Command]] | None = None
        """Every command with its time, for tests; None where it is not wanted."""
        self._source = SimulatedSource(spec.source, workload.seed)
        self._index = {workload.extent(index): index for index in range(workload.shards)}
        self._events = 0
        self._tick_at = math.inf
        self._meters: dict[int, Meter] = {}
        self._ended: dict[int, int] = {}
        self._ahead: set[ExtentId] = set()
        self._ranks = [_Rank(self, number) for number in range(1, workload.ranks + 1)]
        self._executors: dict[type, Callable[..., None]] = {
            cmd.StartFill: self._fill,
            cmd.Evict: self._evict,
            cmd.Grant: lambda command: self._ranks[command.reader - 1].granted(command.extent, command.stay),
            cmd.Refuse: lambda command: self._ranks[command.reader - 1].refused(command.extent),
            cmd.Fail: lambda command: self._ranks[command.reader - 1].refused(command.extent),
            cmd.Recall: self._recall,
        }

    def run(self) -> list[EpochResult]:
        """Run every epoch to its end. Raises CacheError, which names the workload, where the node stops or fails."""
        try:
            for rank in self._ranks:
                rank.begin()
            while len(self.results) < self.workload.epochs:
                if not self.clock.step():
                    raise CacheError("nothing happens any more, and readers still wait")
                if self._events > MAX_EVENTS:
                    raise CacheError(f"no end after {MAX_EVENTS:,} events")
        except (AssertionError, CacheError) as error:
            raise CacheError(
                f"{error or 'an invariant'} at {self.clock.now:.3f} s; again with {self.workload!r}"
            ) from error
        return self.results

    def send(self, event: ev.Event) -> None:
        """Send an event to the core, carry out its commands, and plan the tick that the core asks for."""
        self._events += 1
        now = self.clock.now
        for command in self.node.handle(event, now):
            if self.log is not None:
                self.log.append((now, command))
            self._executors[type(command)](command)
        if self.spec.check_every and self._events % self.spec.check_every == 0:
            self.node.check()
        due = self.node.next_deadline()
        if due < self._tick_at:
            self._tick_at = max(due, now)
            self.clock.after(self._tick_at - now, self._tick)

    def meter(self, epoch: int) -> Meter:
        """The meter of an epoch, started by its first rank."""
        return self._meters.setdefault(epoch, Meter(self.clock.now))

    def read(self, extent: ExtentId) -> None:
        """Note that a rank has the bytes: they are not ahead any more."""
        self._ahead.discard(extent)

    def ended(self, epoch: int) -> None:
        """Note that a rank has finished an epoch. The last rank closes the meter."""
        self._ended[epoch] = self._ended.get(epoch, 0) + 1
        if self._ended[epoch] == len(self._ranks):
            self.results.append(self._meters.pop(epoch).close(self.clock.now))

    def _tick(self) -> None:
        self._tick_at = math.inf
        self.send(ev.Tick())

    def _fill(self, command: cmd.StartFill) -> None:
        size_bytes = self.workload.shard_bytes
        if command.from_tier is not None:
            self.clock.after(size_bytes / LOCAL_BYTES_PER_S, lambda: self._filled(command))
            return
        wanted = any(rank.waits_for(command.extent) for rank in self._ranks)
        delay_s, failed = self._source.fetch(size_bytes, self.clock.now)
        code, message = SourceUnavailable.code, "503"
        failure = ev.FillFailed(command.extent, command.tier, code, message, retry=True)
        if failed:
            self.clock.after(delay_s, lambda: self.send(failure))
            return
        self.clock.after(delay_s, lambda: self._fetched(command))
        if not wanted:
            self._ahead.add(command.extent)
            for meter in self._meters.values():
                meter.ahead_bytes = max(meter.ahead_bytes, len(self._ahead) * size_bytes)

    def _fetched(self, command: cmd.StartFill) -> None:
        if self._meters:
            self.meter(min(self._meters)).fill(
                self.clock.now, self._index[command.extent], self.workload.shard_bytes
            )
        self._filled(command)

    def _filled(self, command: cmd.StartFill) -> None:
        self.send(ev.Filled(command.extent, command.tier))
        if command.tier != RAM:
            self.clock.after(COMMIT_S, lambda: self.send(ev.Committed(command.extent, command.tier)))

    def _recall(self, command: cmd.Recall) -> None:
        rank = self._ranks[command.reader - 1]
        self.clock.after(RECALL_DELAY_S, lambda: rank.recalled(command.extent))

    def _evict(self, command: cmd.Evict) -> None:
        self._ahead.discard(command.extent)
        self.clock.after(EVICT_S, lambda: self.send(ev.Evicted(command.extent, command.tier)))


class _Rank:
    """One reader: it demands what a batch touches and it does not hold, computes, and goes on."""

    def __init__(self, simulation: Simulation, number: int) -> None:
        self._simulation, self._number = simulation, number
        self._epoch = self._step = self._request = 0
        self._trace: EpochTrace = EpochTrace((), ())
        self._holding = Holding[int]()
        self._wanted: set[int] = set()
        self._refused: set[int] = set()
        self._demanded_at = 0.0
        self._reading = False

    def begin(self) -> None:
        """Start an epoch: declare the dataset, submit the plan, read."""
        simulation, work = self._simulation, self._simulation.workload
        self._trace = trace(work, self._epoch, self._number - 1)
        self._step = 0
        simulation.meter(self._epoch).touched |= self._trace.touched
        if simulation.spec.declared:
            if self._epoch == 0:
                extents = tuple((work.extent(index), work.shard_bytes) for index in range(work.shards))
                simulation.send(ev.DatasetDeclared(self._number, DATASET, extents))
            rows = tuple((work.extent(index), first, last) for index, first, last in self._trace.plan)
            simulation.send(ev.Planned(self._number, self._number, rows, self._following()))
        self._read()

    def _following(self) -> tuple[ExtentId, ...]:
        """The order of the next epoch, as the loader knows it too."""
        work = self._simulation.workload
        if self._epoch + 1 >= work.epochs:
            return ()
        rows = trace(work, self._epoch + 1, self._number - 1).plan
        return tuple(work.extent(index) for index, _, _ in rows)

    def waits_for(self, extent: ExtentId) -> bool:
        """Return whether this reader waits for an extent."""
        return self._simulation._index[extent] in self._wanted

    def granted(self, extent: ExtentId, stay: Stay) -> None:
        index = self._simulation._index[extent]
        self._simulation.read(extent)
        self._wanted.remove(index)
        self._holding.granted(index, stay)
        self._answered()

    def recalled(self, extent: ExtentId) -> None:
        """Handle a recall, some time after it was sent."""
        reading = self._trace.steps[self._step] if self._reading else ()
        self._release(self._holding.recalled(self._simulation._index[extent], reading))

    def refused(self, extent: ExtentId) -> None:
        index = self._simulation._index[extent]
        self._wanted.remove(index)
        self._refused.add(index)
        self._answered()

    def _read(self) -> None:
        self._demanded_at = self._simulation.clock.now
        self._reading = True
        self._demand(set(self._trace.steps[self._step]) - self._holding.held)

    def _demand(self, wanted: set[int]) -> None:
        """Demand all at once, as the loader does. The answers may come before this returns."""
        work = self._simulation.workload
        self._wanted, self._refused = set(wanted), set()
        for index in sorted(wanted):
            self._request += 1
            self._simulation.send(
                ev.Demanded(ReaderId(self._number), self._request, work.extent(index), True, work.shard_bytes)
            )
        if not wanted:
            self._simulation.clock.after(0.0, self._compute)

    def _answered(self) -> None:
        if self._wanted:
            return
        if not self._refused:
            self._simulation.clock.after(0.0, self._compute)
            return
        # as the loader does under pressure: copy out what came, release it all, demand the rest
        refused, held = self._refused, self._holding.held
        if not held and self._simulation.clock.now - self._demanded_at > ROOM_TIMEOUT_S:
            raise CacheError(f"reader {self._number} was refused everything for {ROOM_TIMEOUT_S:.0f} s")
        pause_s = 0.0 if held else PAUSE_S
        self._simulation.clock.after(pause_s, lambda: self._retry(refused))

    def _retry(self, refused: set[int]) -> None:
        self._release(self._holding.refused())
        self._demand(refused)

    def _compute(self) -> None:
        simulation = self._simulation
        self._reading = False
        self._release(self._holding.read(self._trace.steps[self._step]))
        simulation.meter(self._epoch).stall_s += simulation.clock.now - self._demanded_at
        simulation.clock.after(simulation.spec.step_s, self._next)

    def _next(self) -> None:
        simulation = self._simulation
        self._step += 1
        if simulation.spec.declared:
            simulation.send(ev.Passed(self._number, self._step))
        if self._step < len(self._trace.steps):
            self._read()
            return
        simulation.ended(self._epoch)
        self._epoch += 1
        if self._epoch < simulation.workload.epochs:
            self.begin()

    def _release(self, indices: Iterable[int]) -> None:
        for index in sorted(indices):
            self._simulation.send(
                ev.Released(ReaderId(self._number), self._simulation.workload.extent(index))
            )


def tiers_of(ram_bytes: int, nvme_bytes: int = 0) -> tuple[TierSpec, ...]:
    """The RAM tier, and one NVMe tier where it has a budget."""
    disk = (TierSpec(TierName("nvme0"), nvme_bytes),) if nvme_bytes else ()
    return (TierSpec(RAM, ram_bytes), *disk)
