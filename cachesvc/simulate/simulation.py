"""The real core of one node under a virtual clock: commands are carried out after the time that they would take.

All randomness comes from one seed, so the same run gives the same trace. A failure names the workload that repeats it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cachesvc.core import commands as cmd
from cachesvc.core.errors import CacheError
from cachesvc.core.model import ExtentId
from cachesvc.simulate.clock import Clock
from cachesvc.simulate.epochs import Epochs
from cachesvc.simulate.measure import EpochResult
from cachesvc.simulate.simulated_node import NodeSpec, SimulatedNode
from cachesvc.simulate.simulated_source import SimulatedSource
from cachesvc.simulate.trace import Workload

MAX_EVENTS = 50_000_000


class Simulation:
    """One node, its source and the ranks of one job."""

    def __init__(self, spec: NodeSpec, workload: Workload) -> None:
        self.clock = Clock()
        self.epochs = Epochs(self.clock, workload.ranks)
        self._workload = workload
        self._source = SimulatedSource(spec.source, workload.seed)
        ranks = range(1, workload.ranks + 1)
        self.node = SimulatedNode("node", spec, workload, self.clock, self.epochs, self, ranks)

    def run(self) -> list[EpochResult]:
        """Run every epoch to its end. Raises CacheError, which names the workload, where the node stops or fails."""
        for rank in self.node.ranks.values():
            self.clock.after(0.0, rank.begin)
        epochs = self._workload.epochs
        run_until(lambda: len(self.epochs.results) >= epochs, self.clock, (self.node,))
        return self.epochs.results

    def fetch(self, node: SimulatedNode, command: cmd.StartFill) -> None:
        """Fetch an extent from the source."""
        delay_s, failed = self._source.fetch(self._workload.shard_bytes, self.clock.now)
        if failed:
            self.clock.after(delay_s, lambda: node.failed(command))
        else:
            self.clock.after(delay_s, lambda: self._fetched(command))

    def evicted(self, node: SimulatedNode, extent: ExtentId) -> None:
        """Nothing depends on a copy of the only node."""

    def _fetched(self, command: cmd.StartFill) -> None:
        index = self.node.index[command.extent]
        for meter in self.epochs.running()[:1]:
            meter.fill(self.clock.now, index, self._workload.shard_bytes)
        self.node.filled(command)


def run_until(done: Callable[[], bool], clock: Clock, nodes: Sequence[SimulatedNode]) -> None:
    """Run the clock. Raises CacheError, which names the workload, where the nodes stop or fail before they are `done`."""
    try:
        while not done():
            if not clock.step():
                raise CacheError("nothing happens any more, and readers still wait")
            if sum(node.event_count for node in nodes) > MAX_EVENTS:
                raise CacheError(f"no end after {MAX_EVENTS:,} events")
    except (AssertionError, CacheError) as error:
        workload = nodes[0].workload
        raise CacheError(
            f"{error or 'an invariant'} at {clock.now:.3f} s; again with {workload!r}"
        ) from error
