"""One simulated node: the real core, its readers, and an executor that takes as long as the real one would."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from cachesvc.core import commands as cmd
from cachesvc.core import events as ev
from cachesvc.core.errors import SourceUnavailable
from cachesvc.core.model import RAM, ExtentId, TierName
from cachesvc.core.node.node import Node
from cachesvc.core.tiering.policy import NodeSettings, TierSpec
from cachesvc.simulate.clock import Clock
from cachesvc.simulate.epochs import Epochs
from cachesvc.simulate.holding import RECALL_DELAY_S
from cachesvc.simulate.rank import Rank
from cachesvc.simulate.simulated_source import SourceSpec
from cachesvc.simulate.trace import Workload

EVICT_S = 0.0002
"""Unlinking a file or closing a memfd."""
COMMIT_S = 0.005
"""fsync, rename and an index row."""
LOCAL_BYTES_PER_S = 2e9
"""Copying from a lower tier: one NVMe drive."""


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


class Origin(Protocol):
    """The place where a node's fills get their bytes. It owes `SimulatedNode.filled` or `failed` for each fetch."""

    def fetch(self, node: SimulatedNode, command: cmd.StartFill) -> None:
        """Begin to fetch an extent from outside the node."""
        ...

    def evicted(self, node: SimulatedNode, extent: ExtentId) -> None:
        """Note that a copy leaves the node."""
        ...


class SimulatedNode:
    """A core and the ranks on its node. `ranks` are numbered from 1 over all nodes."""

    def __init__(
        self,
        name: str,
        spec: NodeSpec,
        workload: Workload,
        clock: Clock,
        epochs: Epochs,
        origin: Origin,
        ranks: Sequence[int],
    ) -> None:
        self.name, self.spec, self.workload, self.clock, self.epochs = name, spec, workload, clock, epochs
        self.core = Node(spec.tiers, spec.settings)
        self.log: list[tuple[float, cmd.Command]] | None = None
        """Every command with its time, for tests; None where it is not wanted."""
        self.event_count = 0
        self.index = {workload.extent(index): index for index in range(workload.shards)}
        self.ranks = {number: Rank(self, number) for number in ranks}
        self._origin = origin
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
        if self.spec.check_every and self.event_count % self.spec.check_every == 0:
            self.core.check()
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
        self._origin.fetch(self, command)

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
        self._origin.evicted(self, command.extent)
        self.clock.after(EVICT_S, lambda: self.send(ev.Evicted(command.extent, command.tier)))


def tiers_of(ram_bytes: int, nvme_bytes: int = 0) -> tuple[TierSpec, ...]:
    """The RAM tier, and one NVMe tier where it has a budget."""
    disk = (TierSpec(TierName("nvme0"), nvme_bytes),) if nvme_bytes else ()
    return (TierSpec(RAM, ram_bytes), *disk)
