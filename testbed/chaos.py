"""Seeded faults of a cluster while ranks read: kills, pauses, cuts, slow links, nodes that join, leave and are renamed, and
a list of members that is empty.

Events come one after another, each when the ranks have read a given number of extents. The ranks wait for a late event,
so a seed gives the same events at the same places of a run. Each event is undone before the next, but for members that
have left.
"""

from __future__ import annotations

import random
import shutil
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from testbed.cluster import Cluster, Node
from testbed.ranks import Ledger, Ranks, Step
from testbed.records import Records

SLOW_RATE = 1e6
"""Bytes/s of a slow link."""
LONGEST_S = 2.0
"""The longest that a pause, a cut, a slow link or an empty list of members lasts."""
LEAST_MEMBERS = 2
ANYWHERE = ("kill", "empty", "stop", "leave or join", "rename", "no list")
BY_LINK = ("cut in", "cut out", "cut both", "slow")


@dataclass(frozen=True, slots=True)
class Event:
    """A fault of a node, after the ranks have read `after_steps` extents. It lasts `lasts_s`."""

    after_steps: int
    kind: str
    node: int
    lasts_s: float

    def __str__(self) -> str:
        return f"{self.kind} n{self.node} after {self.after_steps:,} steps, {self.lasts_s:.1f} s"


def schedule(seed: int, events: int, nodes: int, steps: int, links: bool) -> list[Event]:
    """Events over a run of `steps` extents. `links`: faults of links, too."""
    draw = random.Random(seed)
    kinds = ANYWHERE + BY_LINK if links else ANYWHERE
    after = sorted(draw.randrange(steps) for _ in range(events))
    return [
        Event(at, draw.choice(kinds), draw.randrange(nodes), draw.uniform(0.1, LONGEST_S)) for at in after
    ]


class Chaos:
    """Applies events to a cluster whose members have distinct names."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._ended = threading.Event()
        self._turn = threading.Condition()
        self._next_at = 0
        """The steps after which the next event begins."""
        self._steps: list[Step] = []
        self.errors: list[str] = []
        self.done: list[str] = []
        self._renamed = 0

    def read(self, records: Records, epochs: int, events: list[Event]) -> Ledger:
        """Read epochs by a rank on each node during the events; return the ledger, with errors of the events."""
        ranks = Ranks(self._cluster.nodes, records)
        self._steps = ranks.ledger.steps
        self._next_at = events[0].after_steps
        thread = threading.Thread(target=self._run, args=(events,))
        thread.start()
        try:
            return ranks.read(epochs, pace=self._pace)
        finally:
            self._ended.set()
            thread.join()
            ranks.ledger.errors.extend(self.errors)

    def _run(self, events: list[Event]) -> None:
        """Apply all events; the last ones may find the ranks at their end."""
        for event, later in zip(events, [*events[1:], None]):
            while len(self._steps) < event.after_steps and not self._ended.wait(0.005):
                pass
            with self._turn:
                self._next_at = later.after_steps if later else sys.maxsize
                self._turn.notify_all()
            try:
                self.apply(event)
            except Exception as error:  # noqa: BLE001  (the ledger reports it)
                self.errors.append(f"{event}: {type(error).__name__}: {error}")
            else:
                self.done.append(str(event))

    def _pace(self) -> None:
        """Wait while an event is late."""
        with self._turn:
            self._turn.wait_for(lambda: len(self._steps) <= self._next_at)

    def apply(self, event: Event) -> None:
        """Cause one fault, and undo it after its time."""
        cluster, node = self._cluster, self._cluster.nodes[event.node]
        if event.kind == "leave or join":
            leaves = node in cluster.members and len(cluster.members) > LEAST_MEMBERS
            (cluster.leave if leaves else cluster.join)(event.node)
        elif event.kind in ("kill", "empty"):
            node.kill()
            if event.kind == "empty":
                shutil.rmtree(node.root / "nvme", ignore_errors=True)
            node.start()
        elif event.kind == "rename":
            self._rename(node)
        else:
            self._for_a_while(event, node)

    def _rename(self, node: Node) -> None:
        node.stop()
        self._renamed += 1
        node.name = f"r{self._renamed}"
        node.start()

    def _for_a_while(self, event: Event, node: Node) -> None:
        begin: dict[str, Callable[[], None]] = {
            "stop": node.pause,
            "no list": partial(self._cluster.list_members, []),
            "cut in": partial(self._cluster.cut, event.node, "in"),
            "cut out": partial(self._cluster.cut, event.node, "out"),
            "cut both": partial(self._cluster.cut, event.node, "both"),
            "slow": partial(self._cluster.slow, event.node, SLOW_RATE),
        }
        ends: dict[str, Callable[[], None]] = {"stop": node.resume, "no list": self._cluster.list_members}
        end = ends.get(event.kind, partial(self._cluster.heal, event.node))
        if event.kind in begin:
            begin[event.kind]()
            try:
                time.sleep(event.lasts_s)
            finally:
                end()
