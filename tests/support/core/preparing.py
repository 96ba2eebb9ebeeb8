"""The node's state machine with a dataset that is prepared from another one."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import rule

from cachesvc.core.commands import Command, StartFill
from cachesvc.core.events import (
    DatasetDeclared,
    FillFailed,
    PreparerJoined,
    PreparerStalled,
    ReaderGone,
)
from cachesvc.core.model import ExtentId, ReaderId
from tests.support.core.machine import NodeMachine
from tests.support.core.small_node import MADE, PREPARED, SOURCES, jobs, picks, readers

SOURCE_OF = {extent: source for (extent, _), (source, _) in zip(MADE, SOURCES, strict=True)}
made = st.sampled_from(sorted(SOURCE_OF))
preparers = st.integers(101, 103).map(ReaderId)


class PreparingMachine(NodeMachine):
    """Preparers join, stall, leave and fail, beside all that happens to other data."""

    def __init__(self) -> None:
        super().__init__()
        self.joined: set[ReaderId] = set()

    def obey(self, command: Command) -> None:
        if isinstance(command, StartFill) and command.preparer is not None:
            assert command.preparer in self.joined, "work for a preparer that left"
            source = SOURCE_OF[command.extent]
            assert any(source in stored for stored in self.stored.values()), (
                "prepared before its source is here"
            )
        elif isinstance(command, StartFill):
            assert command.extent not in SOURCE_OF or command.from_tier, "no source has prepared bytes"
        super().obey(command)

    @property
    def is_claimed(self) -> bool:
        dataset = self.node.policy.shares.datasets.get(PREPARED)
        return dataset is not None and dataset.claimed

    @rule(job=jobs)
    def declare_prepared(self, job: int) -> None:
        self.send(DatasetDeclared(job, PREPARED, tuple(MADE), made_from=SOURCES, uneven=True))

    @rule(job=jobs)
    def prefetch_prepared(self, job: int) -> None:
        self.prefetch(job, PREPARED)

    @rule(preparer=preparers)
    def preparer_joins(self, preparer: ReaderId) -> None:
        if preparer not in self.joined:
            self.joined.add(preparer)
            self.send(PreparerJoined(preparer, PREPARED))

    @rule(preparer=preparers)
    def preparer_stalls(self, preparer: ReaderId) -> None:
        if preparer in self.joined:
            self.joined.remove(preparer)
            self.send(PreparerStalled(preparer))
            self.fail_fills_of(preparer)

    @rule(preparer=preparers)
    def preparer_dies(self, preparer: ReaderId) -> None:
        self.joined.discard(preparer)
        self.send(ReaderGone(preparer))
        self.fail_fills_of(preparer)

    def fail_fills_of(self, preparer: ReaderId) -> None:
        for fill in [fill for fill in self.fills if fill.preparer == preparer]:
            self.fills.remove(fill)
            self.send(FillFailed(fill.extent, fill.tier, 11, "no progress", True))

    @rule(reader=readers, extent=made, joins=st.booleans())
    def demand_prepared(self, reader: ReaderId, extent: ExtentId, joins: bool) -> None:
        """Readers claim the dataset before they demand its extents, and most of them prepare, too."""
        if not self.is_claimed:
            self.declare_prepared(1)
        if joins:
            self.preparer_joins(ReaderId(101))
        self.demand(reader, extent, True)

    @rule(pick=picks, takes=st.integers(1, 3))
    def preparer_is_done(self, pick: int, takes: int) -> None:
        prepared = [fill for fill in self.fills if fill.preparer is not None]
        if prepared:
            fill = prepared[pick % len(prepared)]
            self.fill_completes(self.fills.index(fill), 0, min(takes, fill.size_bytes))

    @rule(job=jobs, order=st.lists(made, max_size=8))
    def plan_prepared(self, job: int, order: list[ExtentId]) -> None:
        if self.is_claimed:
            self.plan(3, job, order, 1, False, 0, False)
