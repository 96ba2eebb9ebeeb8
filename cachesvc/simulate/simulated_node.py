"""One simulated node: the real core, an executor that takes as long as the real one would, and readers of a training job.

A reader is one rank, with the loader's rules for demands, releases and retries. It holds extents by the rules of
`loader/reading/lease_table.py`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from cachesvc.core import commands as cmd
from cachesvc.core import events as ev
from cachesvc.core.errors import CacheError, SourceUnavailable
from cachesvc.core.model import RAM, DatasetId, ExtentId, ReaderId, Stay, TierName
from cachesvc.core.node.node import Node
from cachesvc.core.tiering.policy import NodeSettings, TierSpec
from cachesvc.simulate.measure import Clock, Epochs
from cachesvc.simulate.trace import EpochTrace, Workload, trace

DATASET = DatasetId("simulated")
PAUSE_S = 0.02
"""The loader's pause before a reader that was refused everything asks again."""
ROOM_TIMEOUT_S = 30.0
"""The loader's timeout for room."""
RECALL_DELAY_S = 1.0
"""The loader polls for recalls once a second: the most by which a release is late, unless a read uses the extent."""
T = TypeVar("T")
EVICT_S = 0.0002
"""Unlinking a file or closing a memfd."""
COMMIT_S = 0.005
"""fsync, rename and an index row."""
LOCAL_BYTES_PER_S = 2e9
"""Copying from a lower tier: one NVMe drive."""


@dataclass(frozen=True, slots=True)
class SourceSpec:
    """The time to the first byte is `latency_s` x lognormal(0, `spread`). A transfer gets at most `connection_bytes_per_s`,
    all transfers together `bytes_per_s`. A fetch fails with probability `fault_rate`."""

    latency_s: float = 0.02
    spread: float = 0.3
    connection_bytes_per_s: float = 500e6
    bytes_per_s: float = 2e9
    fault_rate: float = 0.0


class SimulatedSource:
    """Computes when each fetch ends. The shared bandwidth serves transfers in the order of their first bytes."""

    def __init__(self, spec: SourceSpec, seed: int) -> None:
        self._spec = spec
        self._random = random.Random(seed)
        self._free_at = 0.0

    def fetch(self, size_bytes: int, now: float) -> tuple[float, bool]:
        """The seconds until a fetch of `size_bytes` that starts now ends, and whether it fails."""
        spec = self._spec
        first_byte = now + spec.latency_s * self._random.lognormvariate(0.0, spec.spread)
        if self._random.random() < spec.fault_rate:
            return first_byte - now, True
        self._free_at = max(first_byte, self._free_at) + size_bytes / spec.bytes_per_s
        return max(self._free_at, first_byte + size_bytes / spec.connection_bytes_per_s) - now, False


class SimulatedLink:
    """One direction of a node's network link, which serves transfers one after another."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0

    def carry(self, size_bytes: int, now: float) -> float:
        """Add a transfer that starts now; the time when it ends, in seconds."""
        self._free_at = max(now, self._free_at) + size_bytes / self._bytes_per_s
        return self._free_at


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """The simulated node: the budgets of the tiers, the core's settings, the source, and the compute time of a step."""

    tiers: tuple[TierSpec, ...]
    settings: NodeSettings = field(default_factory=NodeSettings)
    source: SourceSpec = field(default_factory=SourceSpec)
    step_s: float = 0.05
    declared: bool = True
    """False: no job declares the dataset, and there are no plans."""


class SimulatedNode:
    """A core and the ranks on its node. `ranks` are numbered from 1 over all nodes."""

    def __init__(
        self,
        name: str,
        spec: NodeSpec,
        workload: Workload,
        clock: Clock,
        epochs: Epochs,
        fetch: Callable[[SimulatedNode, cmd.StartFill], None],
        evicted: Callable[[SimulatedNode, ExtentId], None],
        ranks: Sequence[int],
    ) -> None:
        """`fetch` begins to get an extent from outside the node, and owes `filled` or `failed` for it. `evicted` notes that
        a copy leaves the node."""
        self.name, self.spec, self.workload, self.clock, self.epochs = name, spec, workload, clock, epochs
        self.core = Node(spec.tiers, spec.settings)
        self.log: list[tuple[float, cmd.Command]] | None = None
        """Every command with its time, for tests; None where it is not wanted."""
        self.event_count = 0
        self.index = {workload.extent(index): index for index in range(workload.shards)}
        self.ranks = {number: Rank(self, number) for number in ranks}
        self._fetch, self._evicted = fetch, evicted
        self._tick_at = math.inf
        self._ahead: set[ExtentId] = set()
        self._executors: dict[type, Callable[..., None]] = {
            cmd.StartFill: self._fill,
            cmd.Evict: self._evict,
            cmd.Grant: lambda command: self.ranks[command.reader].granted(command.extent, command.stay),
            cmd.Refuse: lambda command: self.ranks[command.reader].refused(command.extent),
            cmd.Fail: lambda command: self.ranks[command.reader].refused(command.extent),
            cmd.Recall: self._recall,
        }

    def send(self, event: ev.Event) -> None:
        """Send an event to the core, carry out its commands, and plan the tick that the core asks for."""
        self.event_count += 1
        now = self.clock.now
        for command in self.core.handle(event, now):
            if self.log is not None:
                self.log.append((now, command))
            self._executors[type(command)](command)
        due = self.core.next_deadline()
        if due < self._tick_at:
            self._tick_at = max(due, now)
            self.clock.after(self._tick_at - now, self._tick)

    def read(self, extent: ExtentId) -> None:
        """Note that a rank has the bytes: they are not ahead any more."""
        self._ahead.discard(extent)

    def filled(self, command: cmd.StartFill, from_peer: bool = False) -> None:
        """End a fill that has all bytes."""
        self.send(ev.Filled(command.extent, command.tier, from_peer))
        if command.tier != RAM:
            self.clock.after(COMMIT_S, lambda: self.send(ev.Committed(command.extent, command.tier)))

    def failed(self, command: cmd.StartFill) -> None:
        """End a fill that failed."""
        code, message = SourceUnavailable.code, "503"
        self.send(ev.FillFailed(command.extent, command.tier, code, message, retry=True))

    def _tick(self) -> None:
        self._tick_at = math.inf
        self.send(ev.Tick())

    def _fill(self, command: cmd.StartFill) -> None:
        if command.from_tier is not None:
            self.clock.after(self.workload.shard_bytes / LOCAL_BYTES_PER_S, lambda: self.filled(command))
            return
        self._note_ahead(command.extent)
        self._fetch(self, command)

    def _note_ahead(self, extent: ExtentId) -> None:
        if any(rank.waits_for(extent) for rank in self.ranks.values()):
            return
        self._ahead.add(extent)
        for meter in self.epochs.running():
            meter.ahead_bytes = max(meter.ahead_bytes, len(self._ahead) * self.workload.shard_bytes)

    def _recall(self, command: cmd.Recall) -> None:
        rank = self.ranks[command.reader]
        self.clock.after(RECALL_DELAY_S, lambda: rank.recalled(command.extent))

    def _evict(self, command: cmd.Evict) -> None:
        self._ahead.discard(command.extent)
        self._evicted(self, command.extent)
        self.clock.after(EVICT_S, lambda: self.send(ev.Evicted(command.extent, command.tier)))


def tiers_of(ram_bytes: int, nvme_bytes: int = 0) -> tuple[TierSpec, ...]:
    """The RAM tier, and one NVMe tier where it has a budget."""
    disk = (TierSpec(TierName("nvme0"), nvme_bytes),) if nvme_bytes else ()
    return (TierSpec(RAM, ram_bytes), *disk)


class Holding(Generic[T]):
    """Extents that a reader holds: kept ones until they are recalled; streaming ones until a later read leaves them out,
    or for one read only where others need the room. The methods return what the reader releases."""

    def __init__(self) -> None:
        self.held: set[T] = set()
        self._brief: set[T] = set()
        self._recalled: set[T] = set()
        self._pressed = False

    def granted(self, extent: T, stay: Stay) -> None:
        """Hold one more extent."""
        self.held.add(extent)
        if stay != "kept":
            self._brief.add(extent)
        self._pressed |= stay == "once"

    def read(self, touched: Collection[T]) -> set[T]:
        """End a read of these extents."""
        passed = self._brief if self._pressed else self._brief.difference(touched)
        self._pressed = False
        return self._forget(passed | self._recalled & self.held)

    def refused(self) -> set[T]:
        """Release everything: a read found no room. It has copied out what came, and holds nothing while it waits."""
        return self._forget(set(self.held))

    def recalled(self, extent: T, reading: Collection[T]) -> set[T]:
        """Release a recalled extent, now or after the read that uses it."""
        if extent in reading:
            self._recalled.add(extent)
            return set()
        return self._forget({extent} & self.held)

    def _forget(self, gone: set[T]) -> set[T]:
        self.held -= gone
        self._brief -= gone
        self._recalled -= gone
        return gone


class Rank:
    """One reader: it demands what a batch touches and it does not hold, computes, and goes on."""

    def __init__(self, node: SimulatedNode, number: int) -> None:
        self._node, self._number = node, number
        self._epoch = self._step = self._request = 0
        self._trace: EpochTrace = EpochTrace((), ())
        self.holding = Holding[int]()
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
            planned = ev.Planned(self._number, self._number, rows, self._following())
            node.send(replace(planned, local=self._trace.own is not None))
        self._read()

    def _following(self) -> tuple[ExtentId, ...]:
        """The order of the next epoch, as the loader knows it too."""
        work, own = self._node.workload, self._trace.own or ()
        if self._epoch + 1 >= work.epochs:
            return tuple(map(work.extent, own))
        rows = trace(work, self._epoch + 1, self._number - 1).plan
        return tuple(map(work.extent, dict.fromkeys([*(index for index, _, _ in rows), *own])))

    def waits_for(self, extent: ExtentId) -> bool:
        """Return whether this reader waits for an extent."""
        return self._node.index[extent] in self._wanted

    def granted(self, extent: ExtentId, stay: Stay) -> None:
        index = self._node.index[extent]
        self._node.read(extent)
        self._wanted.remove(index)
        self.holding.granted(index, stay)
        self._answered()

    def recalled(self, extent: ExtentId) -> None:
        """Handle a recall, some time after it was sent."""
        reading = self._trace.steps[self._step] if self._reading else ()
        self._release(self.holding.recalled(self._node.index[extent], reading))

    def refused(self, extent: ExtentId) -> None:
        index = self._node.index[extent]
        self._wanted.remove(index)
        self._refused.add(index)
        self._answered()

    def _read(self) -> None:
        self._demanded_at = self._node.clock.now
        self._reading = True
        self._demand(set(self._trace.steps[self._step]) - self.holding.held)

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
        refused, held = self._refused, self.holding.held
        if not held and self._node.clock.now - self._demanded_at > ROOM_TIMEOUT_S:
            raise CacheError(f"reader {self._number} was refused everything for {ROOM_TIMEOUT_S:.0f} s")
        pause_s = 0.0 if held else PAUSE_S
        self._node.clock.after(pause_s, lambda: self._retry(refused))

    def _retry(self, refused: set[int]) -> None:
        self._release(self.holding.refused())
        self._demand(refused)

    def _compute(self) -> None:
        node = self._node
        self._reading = False
        self._release(self.holding.read(self._trace.steps[self._step]))
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
