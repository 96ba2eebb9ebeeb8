"""A Hypothesis state machine that drives a node with random events."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cachesvc.core.commands import Command, Evict, Fail, FindCopy, Grant, Recall, Refuse, StartFill, Verify
from cachesvc.core.events import (
    CommitFailed,
    Committed,
    Corrupt,
    DatasetDeclared,
    Demanded,
    Event,
    EvictAsked,
    Evicted,
    FillAgain,
    Filled,
    FillFailed,
    HoldReported,
    JobEnded,
    NotGranted,
    Passed,
    Pinned,
    PlanEnded,
    Planned,
    Prefetched,
    QuotasChanged,
    ReaderGone,
    Recovered,
    Released,
    Renewed,
    Resized,
    Stalled,
    Tick,
    TierBack,
    TierLost,
    Unpinned,
    Verified,
)
from cachesvc.core.model import RAM, DatasetId, ExtentId, ReaderId, TierName
from cachesvc.core.records.copy_phases import TRANSITIONS, CopyEvent, Phase
from cachesvc.core.tiering.retention import STRETCHES
from tests.support.core.invariants import check
from tests.support.core.node import status
from tests.support.core.small_node import (
    BUDGETS,
    DATASETS,
    EXTENT_IDS,
    EXTENTS,
    NVME,
    ROOMY,
    SAMPLE_BYTES,
    SIZES,
    datasets,
    extents,
    jobs,
    picks,
    readers,
    small_node,
)


class NodeMachine(RuleBasedStateMachine):
    """A node, and an executor of its commands that is late, fails, and loses tiers."""

    transitions: ClassVar[Mapping[tuple[Phase, CopyEvent], Phase]] = TRANSITIONS

    def __init__(self) -> None:
        super().__init__()
        self.budgets = BUDGETS
        self.node = small_node(self.budgets, 0.0, self.transitions)
        self.now = 0.0
        self.request = 0
        self.fills: list[StartFill] = []
        self.evictions: list[Evict] = []
        self.commits: list[tuple[ExtentId, TierName]] = []
        self.open: dict[int, tuple[ReaderId, ExtentId]] = {}
        self.leases: list[tuple[ReaderId, ExtentId, TierName]] = []
        self.last: Grant | None = None
        self.stored: dict[TierName, set[ExtentId]] = {RAM: set(), NVME: set()}
        self.takes = dict(SIZES)
        self.held = False
        self.checks: list[Verify] = []
        self.recalls: set[tuple[ReaderId, ExtentId]] = set()
        self.resized = False
        self.lost = False

    def send(self, event: Event) -> None:
        self.now += 0.01
        for command in self.node.handle(event, self.now):
            self.obey(command)

    def obey(self, command: Command) -> None:
        if isinstance(command, StartFill):
            self.reserve(command)
        elif isinstance(command, Evict):
            leased = {(extent, tier) for _, extent, tier in self.leases}
            assert (command.extent, command.tier) not in leased, "evicted under a lease"
            assert (command.extent, command.tier) not in self.commits, "evicted while being committed"
            assert command.extent in self.stored[command.tier]
            self.evictions.append(command)
        elif isinstance(command, Verify):
            assert command.extent in self.stored[command.tier], "a check of an absent copy"
            assert command.tier == NVME
            assert (command.extent, command.tier) not in self.commits, "a check of an uncommitted copy"
            self.checks.append(command)
        elif isinstance(command, Recall):
            if command.wrong:
                self.recalls.add((command.reader, command.extent))
        else:
            assert not isinstance(command, FindCopy), "nodes share nothing here"
            assert self.open.pop(command.request) == (command.reader, command.extent), "answered once"
            if isinstance(command, Grant):
                assert command.extent in self.stored[command.tier]
                self.leases.append((command.reader, command.extent, command.tier))
                self.last = command
            else:
                assert isinstance(command, (Refuse, Fail))

    def reserve(self, command: StartFill) -> None:
        assert all((f.extent, f.tier) != (command.extent, command.tier) for f in self.fills)
        assert command.extent not in self.stored[command.tier], "a fill over a copy"
        if command.from_tier:
            assert command.extent in self.stored[command.from_tier]
        self.fills.append(command)
        going = [f.size_bytes or SIZES[f.extent] for f in self.fills if f.tier == command.tier]
        used = sum(going) + sum(self.takes[extent] for extent in self.stored[command.tier])
        assert used <= self.budgets[command.tier], "a budget exceeded"

    @initialize(
        budgets=st.sampled_from([BUDGETS, ROOMY]),
        held=st.sets(extents, max_size=12),
        unplanned_share=st.sampled_from([0.0, 0.2, 0.5]),
    )
    def the_disk_held_extents(
        self, budgets: dict[TierName, int], held: set[ExtentId], unplanned_share: float
    ) -> None:
        self.budgets = budgets
        self.node = small_node(budgets, unplanned_share, self.transitions)
        self.stored[NVME] |= held
        self.send(Recovered(NVME, {extent: SIZES[extent] for extent in sorted(held)}))

    @rule(reader=readers, extent=extents, wait=st.booleans() | st.just(True))
    def demand(self, reader: ReaderId, extent: ExtentId, wait: bool) -> None:
        self.request += 1
        self.open[self.request] = (reader, extent)
        self.send(Demanded(reader, self.request, extent, wait, SIZES[extent]))
        assert wait or self.request not in self.open, "an answer at once"

    @rule(pick=picks, good=st.booleans())
    def check_ends(self, pick: int, good: bool) -> None:
        if self.checks:
            check = self.checks.pop(pick % len(self.checks))
            if not good:
                self.corrupt(check.extent, check.tier)
            self.send(Verified(check.extent, check.tier))

    @rule(tier=st.sampled_from([RAM, NVME]), part=st.floats(0, 1))
    def other_processes_take_room(self, tier: TierName, part: float) -> None:
        self.send(Resized(tier, int(part * self.budgets[tier])))

    @rule(pick=picks, code=st.sampled_from([0, 4]))
    def fill_completes(self, pick: int, code: int, takes: int = 0) -> None:
        if self.fills:
            fill = self.fills.pop(pick % len(self.fills))
            self.takes[fill.extent] = takes or fill.size_bytes or SIZES[fill.extent]
            self.stored[fill.tier].add(fill.extent)
            if fill.tier != RAM:
                self.commits.append((fill.extent, fill.tier))
            self.send(Filled(fill.extent, fill.tier, code=code, size_bytes=takes))

    @rule(pick=picks, retry=st.booleans(), code=st.sampled_from([5, 7, 8]))
    def fill_fails(self, pick: int, retry: bool, code: int) -> None:
        if self.fills:
            fill = self.fills.pop(pick % len(self.fills))
            self.send(FillFailed(fill.extent, fill.tier, code, "the source is away", retry))

    @rule(pick=picks, works=st.booleans(), code=st.sampled_from([8, 9]))
    def commit_ends(self, pick: int, works: bool, code: int) -> None:
        if self.commits:
            extent, tier = self.commits.pop(pick % len(self.commits))
            if works:
                self.send(Committed(extent, tier))
            else:
                self.recalled(extent, tier, CommitFailed(extent, tier, "disk full", code))

    @rule(pick=picks)
    def eviction_ends(self, pick: int) -> None:
        if self.evictions:
            gone = self.evictions.pop(pick % len(self.evictions))
            self.stored[gone.tier].remove(gone.extent)
            self.send(Evicted(gone.extent, gone.tier))

    @rule(again=st.booleans())
    def the_last_grant_cannot_be_delivered(self, again: bool) -> None:
        grant, self.last = self.last, None
        if grant is not None and (lease := (grant.reader, grant.extent, grant.tier)) in self.leases:
            if again:  # the copy's bytes are wrong
                self.corrupt(grant.extent, grant.tier)
            if lease in self.leases:
                self.leases.remove(lease)
            self.open[grant.request] = grant.reader, grant.extent
            self.send(NotGranted(grant, again))
            assert again or grant.request not in self.open, "an answer at once"

    @rule(pick=picks)
    def release(self, pick: int) -> None:
        if self.leases:
            reader, extent, _ = self.leases[pick % len(self.leases)]
            # The node releases a reader's latest lease of an extent first.
            latest = max(at for at, lease in enumerate(self.leases) if lease[:2] == (reader, extent))
            del self.leases[latest]
            self.send(Released(reader, extent))

    @rule(reader=readers)
    def reader_dies(self, reader: ReaderId) -> None:
        self.leases = [lease for lease in self.leases if lease[0] != reader]
        self.open = {request: asked for request, asked in self.open.items() if asked[0] != reader}
        self.send(ReaderGone(reader))

    @rule(reader=readers, extent=extents)
    def release_without_a_lease(self, reader: ReaderId, extent: ExtentId) -> None:
        if not any(lease[:2] == (reader, extent) for lease in self.leases):
            self.send(Released(reader, extent))

    @rule(extent=extents, in_ram=st.booleans(), most_bytes=st.just(1 << 20) | st.integers(0, 4))
    def hold_and_let_go(self, extent: ExtentId, in_ram: bool, most_bytes: int = 1 << 20) -> None:
        if self.held:
            self.send(ReaderGone(ReaderId(99)))
        else:
            self.send(HoldReported(ReaderId(99), extent, SIZES[extent] if in_ram else 0, 1000, most_bytes))
        self.held = not self.held

    @rule(job=jobs, dataset=datasets, gradual=st.booleans())
    def declare(self, job: int, dataset: DatasetId, gradual: bool) -> None:
        self.send(
            DatasetDeclared(
                job, dataset, DATASETS[dataset], gradual=gradual, sample_bytes=SAMPLE_BYTES[dataset]
            )
        )
        assert gradual or self.node.claims.claimed(dataset)

    @rule(job=jobs, dataset=datasets)
    def prefetch(self, job: int, dataset: DatasetId) -> None:
        self.send(Prefetched(job, dataset))

    @rule(job=jobs)
    def job_ends(self, job: int) -> None:
        self.send(JobEnded(job))

    @rule(
        plan=st.integers(1, 3),
        job=jobs,
        order=st.lists(extents, max_size=12),
        span=st.integers(0, 3),
        again=st.booleans(),
        user=st.integers(0, 1),
        local=st.booleans(),
    )
    def plan(
        self, plan: int, job: int, order: list[ExtentId], span: int, again: bool, user: int, local: bool
    ) -> None:
        entries = tuple((extent, step, step + span) for step, extent in enumerate(order))
        following = (*order, *EXTENT_IDS) * (again * STRETCHES)
        self.send(Planned(plan, job, entries, following[:STRETCHES], user=user, local=local))

    @rule(plan=st.integers(1, 3), step=st.integers(0, 14))
    def passed(self, plan: int, step: int) -> None:
        self.send(Passed(plan, step))

    @rule(plan=st.integers(1, 3))
    def plan_ends(self, plan: int) -> None:
        self.send(PlanEnded(plan))

    @rule(dataset=datasets, quota=st.none() | st.integers(0, 6), of_user=st.none() | st.integers(0, 6))
    def quotas_change(self, dataset: DatasetId, quota: int | None, of_user: int | None) -> None:
        self.send(QuotasChanged(dataset, quota, {1000: of_user}))

    @rule(dataset=datasets, pin=st.booleans(), gradual=st.booleans(), quota=st.none() | st.integers(0, 6))
    def pin(self, dataset: DatasetId, pin: bool, gradual: bool, quota: int | None = None) -> None:
        self.send(Pinned(dataset, gradual, 1000, None, quota) if pin else Unpinned(dataset))
        known = self.node.policy.shares.datasets
        pinned = pin and dataset in known and known[dataset].pinned
        assert gradual or not pinned or self.node.claims.settled(dataset)

    @rule(dataset=datasets)
    def evict(self, dataset: DatasetId) -> None:
        self.send(EvictAsked(dataset, tuple(extent for extent, _ in DATASETS[dataset])))

    @rule(extent=extents, tier=st.sampled_from([RAM, NVME]))
    def corrupt(self, extent: ExtentId, tier: TierName) -> None:
        leases = list(self.leases)
        if tier != RAM:  # a file can be removed while it is open, so its leases end here
            self.leases = [lease for lease in self.leases if lease[1:] != (extent, tier)]
        self.recalled(extent, tier, Corrupt(extent, tier), leases)

    @rule(extent=extents, tier=st.sampled_from([RAM, NVME]))
    def a_copy_is_asked_for_again(self, extent: ExtentId, tier: TierName) -> None:
        leases = list(self.leases)
        copy = self.node.copies.find(extent, self.node.policy.tiers[tier])
        if copy is None or copy.to_evict:
            leases = []  # a reader is asked once only
        elif tier != RAM:
            self.leases = [lease for lease in self.leases if lease[1:] != (extent, tier)]
        self.recalled(extent, tier, FillAgain(extent, tier), leases)

    def recalled(
        self,
        extent: ExtentId,
        tier: TierName,
        event: Event,
        leases: list[tuple[ReaderId, ExtentId, TierName]] | None = None,
    ) -> None:
        """Send `event`, which must recall the wrong copy from its lessees, and from no reader of another copy."""
        had = {
            lease[0] for lease in (self.leases if leases is None else leases) if lease[1:] == (extent, tier)
        }
        held = {ReaderId(99)} if self.held else set()
        self.recalls.clear()
        self.send(event)
        assert {(reader, extent) for reader in had} <= self.recalls
        assert self.recalls <= {(reader, extent) for reader in had | held}

    @rule(tier=st.sampled_from([RAM, NVME]))
    def tier_is_lost(self, tier: TierName) -> None:
        if not self.lost:
            self.lost = True
            self.send(TierLost(tier))

    @rule(held=st.sets(extents, max_size=12))
    def the_lost_disk_is_replaced(self, held: set[ExtentId]) -> None:
        """Fail all operations on the lost disk, except evictions, which are never answered; then renew the tier."""
        if not self.node.policy.tiers[NVME].lost:
            return
        for fill in [fill for fill in self.fills if NVME in (fill.tier, fill.from_tier)]:
            self.fills.remove(fill)
            self.send(FillFailed(fill.extent, fill.tier, 9 if fill.tier == NVME else 7, "lost", True))
        for commit in [commit for commit in self.commits if commit[1] == NVME]:
            self.commits.remove(commit)
            self.send(CommitFailed(*commit, "lost"))
        self.evictions = [evict for evict in self.evictions if evict.tier != NVME]
        self.leases = [lease for lease in self.leases if lease[2] != NVME]
        self.checks = []
        self.stored[NVME] = set(held)
        self.send(Renewed(NVME, {extent: SIZES[extent] for extent in sorted(held)}))

    @rule(stalled=st.booleans())
    def disk_stalls(self, stalled: bool) -> None:
        self.send(Stalled(NVME, stalled))

    @rule()
    def tiers_are_back(self) -> None:
        self.lost = False
        self.send(Stalled(NVME, False))
        self.send(TierBack(RAM))
        self.send(TierBack(NVME))

    @rule(count=st.integers(1, 8))
    def steps_go_on(self, count: int) -> None:
        """Run some of the incremental work on large datasets and plans."""
        for _ in range(count):
            if self.node.work:
                assert self.node.next_deadline() < math.inf, "a step without a deadline"
                self.send(Tick())
                check(self.node)

    @rule()
    def time_passes(self) -> None:
        self.now += 31.0
        self.send(Tick())

    @invariant()
    def accounts_agree(self) -> None:
        check(self.node)

    def teardown(self) -> None:
        """Complete all work and release all leases; every waiter must then have been answered."""
        self.tiers_are_back()
        for _ in range(400):
            busy = self.fills or self.commits or self.evictions or self.leases or self.open
            if not busy and self.node.next_deadline() == math.inf:
                break
            self.fill_completes(0, 0)
            self.commit_ends(0, True, 0)
            self.eviction_ends(0)
            if self.held:
                self.hold_and_let_go(EXTENTS[0][0], 1)
            self.release(0)
            if self.node.next_deadline() < math.inf:
                self.time_passes()
            check(self.node)
        assert not self.open, "a waiter was never answered"
        assert not self.fills
        assert not self.evictions
        assert status(self.node).queued == 0
        for dataset in self.node.policy.shares.datasets.values():
            done = dataset.ready_count + len(dataset.failed) + len(dataset.stuck)
            assert not dataset.prefetched or done == len(dataset.extents), "a prefetch that never ends"
        self.send(TierBack(NVME))
        for number in range(1, 4):
            self.send(ReaderGone(ReaderId(number)))
            self.send(JobEnded(number))
        for name in DATASETS:
            self.send(Unpinned(name))
        while self.node.work:
            self.steps_go_on(1)
        assert not self.node.policy.shares.datasets, "a claim that never ends"
        assert not self.node.plans.ending
        check(self.node)
