"""Nodes under one virtual clock: each has the real core, the placement and the directory of its extents.

A fill asks the extent's owner, and reads from the node that the owner names, or from the source. A node that is filling
passes on what it has, so a transfer from it ends soon after its own fill. Each node has one rank or several of one job.
The ranks of several nodes wait for each other after each step.

All randomness comes from one seed, so the same run gives the same trace. A failure names the workload that repeats it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cachesvc.core import commands as cmd
from cachesvc.core import events as ev
from cachesvc.core.errors import CacheError
from cachesvc.core.model import ExtentId
from cachesvc.core.placement.directory import SOURCE, ExtentDirectory
from cachesvc.core.placement.view import Member, View
from cachesvc.simulate.measure import Clock, EpochResult, Epochs
from cachesvc.simulate.simulated_node import DATASET, NodeSpec, SimulatedLink, SimulatedNode, SimulatedSource
from cachesvc.simulate.trace import Workload

ASK_S = 0.001
"""A question to another node, and its answer."""
RENEW_S = 3.0
"""The interval in which a fill under way renews its lease."""
WAIT_S = 0.5
"""The interval in which a node that waits for another one's fill looks whether that one still means to fill."""
PREFETCH_JOB = 1 << 20
MAX_EVENTS = 50_000_000
LINK_BYTES_PER_S = 1.25e9
"""What each node can send to others, and as much that it can receive."""


@dataclass(slots=True)
class _Peer:
    """A node as the others see it. `followers`: for each extent that it is filling, what to call with its success."""

    node: SimulatedNode
    view: View
    directory: ExtentDirectory
    sends: SimulatedLink
    receives: SimulatedLink
    followers: dict[ExtentId, list[Callable[[bool], None]]]
    leases: dict[ExtentId, int]


class Simulation:
    """Nodes of equal size, their source, and the ranks of one job. `idle_nodes` more are members without a rank, which do
    not claim the dataset."""

    def __init__(
        self,
        spec: NodeSpec,
        workload: Workload,
        link_bytes_per_s: float = LINK_BYTES_PER_S,
        idle_nodes: int = 0,
    ) -> None:
        self.clock = Clock()
        self.workload = workload
        self.epochs = Epochs(self.clock, workload.ranks, in_step=workload.ranks if workload.nodes > 1 else 1)
        self.source_bytes = 0
        """Bytes from the source since the start."""
        self.peer_bytes = 0
        """Bytes between nodes since the start."""
        self._source = SimulatedSource(spec.source, workload.seed)
        each = workload.ranks // workload.nodes
        weight = sum(tier.budget_bytes for tier in spec.tiers)
        members = tuple(Member(f"node{at:03}", weight) for at in range(workload.nodes + idle_nodes))
        self.peers: dict[str, _Peer] = {}
        self._owners: dict[ExtentId, str] = {}
        for at, member in enumerate(members):
            ranks = range(at * each + 1, min((at + 1) * each, workload.ranks) + 1)
            parts = spec, workload, self.clock, self.epochs, self.fetch, self.evicted
            node = SimulatedNode(member.name, *parts, ranks)
            links = SimulatedLink(link_bytes_per_s), SimulatedLink(link_bytes_per_s)
            self.peers[member.name] = _Peer(
                node, View(member.name, members), ExtentDirectory(), *links, {}, {}
            )

    @property
    def node(self) -> SimulatedNode:
        """The first node."""
        return self.nodes[0]

    @property
    def nodes(self) -> list[SimulatedNode]:
        """The nodes, by name."""
        return [peer.node for peer in self.peers.values()]

    def run(self, between: Callable[[int], None] = lambda _: None) -> list[EpochResult]:
        """Run every epoch to its end, and call `between` with the number of those that have ended. Raises CacheError, which
        names the workload, where a node stops or fails."""
        self._join()
        for node in self.nodes:
            for rank in node.ranks.values():
                self.clock.after(0.0, rank.begin)
        for ended in range(1, self.workload.epochs + 1):
            run_until(lambda ended=ended: len(self.epochs.results) >= ended, self.clock, self.nodes)  # type: ignore[misc]
            between(ended)
        return self.epochs.results

    def replace(self, name: str) -> None:
        """Take all copies of a node, as if another machine took its place."""
        self.peers[name].node.send(ev.EvictAsked(DATASET))

    def prefetch(self) -> int:
        """Let all nodes prefetch the dataset at once, until none has more to do. Return the bytes from the source. Raises
        CacheError."""
        self._join()
        work = self.workload
        extents = tuple((work.extent(index), work.shard_bytes) for index in range(work.shards))
        for node in self.nodes:
            node.send(ev.DatasetDeclared(PREFETCH_JOB, DATASET, extents))
            node.send(ev.Prefetched(PREFETCH_JOB, DATASET))
        run_until(self._prefetched, self.clock, self.nodes)
        return self.source_bytes

    def fetch(self, node: SimulatedNode, command: cmd.StartFill) -> None:
        """Ask the extent's owner where it is, and fetch it from there."""
        if self.peers[node.name].view.alone:
            self._ask(node, command, frozenset())
        else:
            delay_s = 0.0 if self._owner(node, command.extent).node is node else ASK_S
            self.clock.after(delay_s, lambda: self._ask(node, command, frozenset()))

    def evicted(self, node: SimulatedNode, extent: ExtentId) -> None:
        """Tell the owner that the node has an extent no more."""
        if node.core.where(extent) is None:
            self._owner(node, extent).directory.dropped(node.name, [extent])

    def _join(self) -> None:
        for peer in self.peers.values():
            peer.node.send(ev.ViewChanged(peer.view))

    def _prefetched(self) -> bool:
        progress = [node.core.progress(PREFETCH_JOB) for node in self.nodes]
        return all(
            each.resident_extents + each.stuck_extents + len(each.failed) >= each.total_extents
            for each in progress
        )

    def _owner(self, node: SimulatedNode, extent: ExtentId) -> _Peer:
        peer = self.peers[node.name]
        if peer.view.alone:
            return peer
        if extent not in self._owners:  # all nodes have the same view
            ((self._owners[extent],),) = peer.view.askable([extent], 1)
        return self.peers[self._owners[extent]]

    def _ask(self, node: SimulatedNode, command: cmd.StartFill, failed: frozenset[str]) -> None:
        extent, now = command.extent, self.clock.now
        owner = self._owner(node, extent)
        if owner.node is not node and not owner.directory.wanted(extent, now):
            owner.node.send(ev.PeerWants(extent))
            if owner.node.core.will_keep(extent) and not owner.directory.wanted(extent, now):
                owner.directory.lookup(owner.node.name, extent, now)
        answer = owner.directory.lookup(node.name, extent, now, failed)
        self.peers[node.name].leases[extent] = answer.generation
        if answer.node == SOURCE:
            self._fetch_from_source(node, command)
        else:
            self._read_from(self.peers[answer.node], node, command, failed)

    def _fetch_from_source(self, node: SimulatedNode, command: cmd.StartFill) -> None:
        delay_s, failed = self._source.fetch(self.workload.shard_bytes, self.clock.now)
        if failed:
            self.clock.after(delay_s, lambda: self._failed(node, command))
        else:
            self.clock.after(delay_s, lambda: self._fetched(node, command))
            self._renew_until(self.clock.now + delay_s, node, command.extent)

    def _renew_until(self, end: float, node: SimulatedNode, extent: ExtentId) -> None:
        """Renew the lease of a fill that takes long."""
        if end - self.clock.now > RENEW_S:
            self.clock.after(RENEW_S, lambda: self._renew(end, node, extent))

    def _renew(self, end: float, node: SimulatedNode, extent: ExtentId) -> None:
        generation = self.peers[node.name].leases.get(extent)
        if generation is not None:
            self._owner(node, extent).directory.renew(node.name, [(extent, generation)], self.clock.now)
            self._renew_until(end, node, extent)

    def _read_from(
        self, upstream: _Peer, node: SimulatedNode, command: cmd.StartFill, failed: frozenset[str]
    ) -> None:
        size_bytes, now = self.workload.shard_bytes, self.clock.now
        sent_at = upstream.sends.carry(size_bytes, now)
        received_at = self.peers[node.name].receives.carry(size_bytes, now)
        ready_at = max(sent_at, received_at)

        def end(complete: bool) -> None:
            if complete:
                self.peer_bytes += size_bytes
                delay_s = max(ASK_S, ready_at - self.clock.now)
                self.clock.after(delay_s, lambda: self._filled(node, command, from_peer=True))
                self._renew_until(self.clock.now + delay_s, node, command.extent)
            else:
                self._ask(node, command, failed | {upstream.node.name})

        if upstream.node.core.where(command.extent) is not None:
            end(True)
        else:
            upstream.followers.setdefault(command.extent, []).append(end)
            self.clock.after(WAIT_S, lambda: self._check_upstream(upstream, command.extent))

    def _check_upstream(self, upstream: _Peer, extent: ExtentId) -> None:
        """End the reads of a fill that never began: its node found no room."""
        if extent not in upstream.followers:
            return
        if upstream.node.core.will_keep(extent):
            self.clock.after(WAIT_S, lambda: self._check_upstream(upstream, extent))
        else:
            self._end_followers(upstream.node, extent, False)

    def _fetched(self, node: SimulatedNode, command: cmd.StartFill) -> None:
        size_bytes = self.workload.shard_bytes
        self.source_bytes += size_bytes
        for meter in self.epochs.running()[:1]:
            meter.fill(self.clock.now, node.index[command.extent], size_bytes)
        self._filled(node, command)

    def _filled(self, node: SimulatedNode, command: cmd.StartFill, from_peer: bool = False) -> None:
        self.peers[node.name].leases.pop(command.extent, None)
        self._owner(node, command.extent).directory.filled(node.name, [command.extent])
        node.filled(command, from_peer)
        self._end_followers(node, command.extent, True)

    def _failed(self, node: SimulatedNode, command: cmd.StartFill) -> None:
        self.peers[node.name].leases.pop(command.extent, None)
        self._owner(node, command.extent).directory.dropped(node.name, [command.extent])
        node.failed(command)
        self._end_followers(node, command.extent, False)

    def _end_followers(self, node: SimulatedNode, extent: ExtentId, complete: bool) -> None:
        for follow in self.peers[node.name].followers.pop(extent, ()):
            follow(complete)


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
