"""Simulated jobs on one node under a virtual clock, whose readers hold extents as real ones do."""

from __future__ import annotations

import random
from collections.abc import Callable

from cachesvc.core import commands as cmd
from cachesvc.core import events as ev
from cachesvc.core.model import RAM, DatasetId, ExtentId, ReaderId, TierName
from cachesvc.core.node.node import Node
from cachesvc.core.tiering.policy import NodeSettings, TierSpec
from cachesvc.simulate.measure import Clock
from cachesvc.simulate.simulated_node import RECALL_DELAY_S, Holding
from tests.support.core.invariants import check

SIZE = 10
CHECK_EVERY = 25
"""Events between two checks of all invariants; a check visits all extents."""
FILL_S, EVICT_S, COMMIT_S, PAUSE_S = 0.015, 0.0002, 0.005, 0.02
NVME = TierName("nvme0")


class Jobs:
    """Jobs on a node whose tiers hold `ram` and `nvme` extents. Asserts invariants every `CHECK_EVERY` events."""

    def __init__(self, ram: int, nvme: int = 0) -> None:
        specs = [TierSpec(RAM, ram * SIZE), *([TierSpec(NVME, nvme * SIZE)] if nvme else [])]
        self.node, self.clock, self.readers = Node(specs, NodeSettings()), Clock(), dict[int, Reader]()
        self.recalls: list[tuple[float, cmd.Recall]] = []
        self._events, self._tick_at = 0, float("inf")

    def send(self, event: ev.Event) -> None:
        for command in self.node.handle(event, self.clock.now):
            self._obey(command)
        self._events += 1
        if self._events % CHECK_EVERY == 0:
            check(self.node)
        due = max(self.node.next_deadline(), self.clock.now)
        if due < self._tick_at:
            self._tick_at = due
            self.clock.after(due - self.clock.now, self._tick)

    def later(self, delay_s: float, event: ev.Event) -> None:
        self.clock.after(delay_s, lambda: self.send(event))

    def wait(self, seconds: float) -> None:
        """Run all jobs for `seconds` of virtual time."""
        until, over = self.clock.now + seconds, list[bool]()
        self.clock.after(seconds, lambda: over.append(True))
        while not over:
            assert self.clock.step()
        assert self.clock.now <= until + 1e-6

    def until(self, done: Callable[[], bool], most_s: float) -> float:
        """Run all jobs until `done`, for at most `most_s`; return the seconds that it took."""
        began = self.clock.now
        while not done():
            assert self.clock.now <= began + most_s, f"not within {most_s} s"
            self.wait(0.1)
        return self.clock.now - began

    def _tick(self) -> None:
        self._tick_at = float("inf")
        self.send(ev.Tick())

    def _obey(self, command: cmd.Command) -> None:
        if isinstance(command, cmd.StartFill):
            self.later(FILL_S, ev.Filled(command.extent, command.tier))
            if command.tier != RAM:
                self.later(FILL_S + COMMIT_S, ev.Committed(command.extent, command.tier))
        elif isinstance(command, cmd.Evict):
            self.later(EVICT_S, ev.Evicted(command.extent, command.tier))
        elif isinstance(command, cmd.Recall):
            self.recalls.append((self.clock.now, command))
            reader = self.readers[command.reader]
            self.clock.after(RECALL_DELAY_S, lambda: reader.recalled(command.extent))
        elif isinstance(command, (cmd.Grant, cmd.Refuse, cmd.Fail)):
            self.readers[command.reader].answered(command)


class Reader:
    """One rank of one job. It reads its whole dataset, one extent per step, in a new order each epoch."""

    def __init__(
        self,
        jobs: Jobs,
        number: int,
        dataset: str,
        count: int,
        user: int = -1,
        step_s: float = 0.05,
        quota_bytes: int | None = None,
    ) -> None:
        self.jobs, self.number, self.user, self.step_s = jobs, ReaderId(number), user, step_s
        self.dataset = DatasetId(dataset)
        self.extents = [ExtentId((dataset + str(at)).encode().ljust(16)) for at in range(count)]
        self.holding = Holding[ExtentId]()
        self.epoch = self.step = self.refusals = 0
        self.epochs = 0
        """Epochs to read before the reader is idle."""
        self.stopped = False
        """True for a reader that neither reads nor answers recalls."""
        self.began: list[float] = []
        self.waits: list[float] = []
        self._asked_at = 0.0
        self._reading: ExtentId | None = None
        self.order: list[ExtentId] = []
        jobs.readers[number] = self
        rows = tuple((each, SIZE) for each in self.extents)
        jobs.send(ev.DatasetDeclared(number, self.dataset, rows, user, quota_bytes))

    def read(self, epochs: int) -> None:
        """Read this many more epochs."""
        idle = self.epoch >= self.epochs
        self.epochs += epochs
        if idle:
            self._begin()

    def end(self) -> None:
        """End the reader's process."""
        self.stopped = True
        self.jobs.send(ev.PlanEnded(self.number))
        self.jobs.send(ev.ReaderGone(self.number))
        self.jobs.send(ev.JobEnded(self.number))

    @property
    def resident(self) -> int:
        return sum(self.jobs.node.where(each) is not None for each in self.extents)

    @property
    def kept(self) -> float:
        """Bytes of its dataset that are kept, in extents."""
        return self.jobs.node.policy.shares.datasets[self.dataset].kept_bytes / SIZE

    @property
    def share(self) -> float:
        shares = self.jobs.node.policy.shares
        return shares.share_bytes(shares.datasets[self.dataset]) / SIZE

    def _begin(self) -> None:
        self.order, following = self._shuffled(self.epoch), self._shuffled(self.epoch + 1)
        rows = tuple((each, step, step) for step, each in enumerate(self.order))
        self.began.append(self.jobs.clock.now)
        self.jobs.send(ev.Planned(self.number, self.number, rows, tuple(following), user=self.user))
        self.step = 0
        self._read()

    def _shuffled(self, epoch: int) -> list[ExtentId]:
        return random.Random(f"{self.number} {epoch}").sample(self.extents, len(self.extents))

    def _read(self) -> None:
        self._asked_at = self.jobs.clock.now
        self._reading = self.order[self.step]
        if self._reading in self.holding.held:
            self._done()
        else:
            self._ask()

    def _ask(self) -> None:
        if not self.stopped and self._reading is not None:
            self.jobs.send(ev.Demanded(self.number, self.step, self._reading, job=self.number))

    def answered(self, command: cmd.Grant | cmd.Refuse | cmd.Fail) -> None:
        if isinstance(command, cmd.Grant):
            self.holding.granted(command.extent, command.stay)
            self._done()
        else:
            self.refusals += 1
            self._give_back(self.holding.refused())
            self.jobs.clock.after(PAUSE_S, self._ask)

    def recalled(self, extent: ExtentId) -> None:
        if not self.stopped:
            self._give_back(self.holding.recalled(extent, (self._reading,) if self._reading else ()))

    def _done(self) -> None:
        assert self._reading is not None
        self.waits.append(self.jobs.clock.now - self._asked_at)
        touched, self._reading = self._reading, None
        self.jobs.clock.after(0.0, lambda: self._give_back(self.holding.read((touched,))))
        self.jobs.clock.after(self.step_s, self._next)

    def _next(self) -> None:
        if self.stopped:
            return
        self.step += 1
        self.jobs.send(ev.Passed(self.number, self.step))
        if self.step < len(self.order):
            self._read()
            return
        self.epoch += 1
        if self.epoch < self.epochs:
            self._begin()

    def _give_back(self, extents: set[ExtentId]) -> None:
        if not self.stopped:
            for extent in sorted(extents):
                self.jobs.send(ev.Released(self.number, extent))
