"""The steps of a fill, and a tier that is lost at each of them."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cachesvc.core import commands, events
from cachesvc.core.errors import CorruptData, OutOfSpace, SourceUnavailable
from cachesvc.core.model import RAM, ExtentId, TierName
from cachesvc.core.node.node import Node
from cachesvc.core.placement.place_search import ReadEnd, Verdict
from cachesvc.core.tiering.policy import NodeSettings, TierSpec
from cachesvc.daemon.datasets import Datasets
from cachesvc.daemon.fills.checks import Checks
from cachesvc.daemon.fills.fill_memory import FillMemory
from cachesvc.daemon.fills.fill_parts import Commits, FillParts
from cachesvc.daemon.fills.fills import Fills
from cachesvc.daemon.fills.holes import HoleRecords
from cachesvc.daemon.fills.preparers import Preparers
from cachesvc.daemon.fills.sent_bytes import SentBytes
from cachesvc.daemon.fills.shared_fills import Located, SharedFills
from cachesvc.daemon.processes import jobs
from cachesvc.sources.timed_reads import SourceCounters
from cachesvc.tiers.ram import RamTier
from cachesvc.tiers.tier import Checksums
from tests.support.descriptors import descriptors
from tests.support.served_datasets import dataset

DISK, ORIGIN = TierName("nvme0"), TierName("nvme1")
GOOD = jobs.JobDone(digests=bytes(8), source_bytes=10)
FROM_NODE = jobs.JobDone(digests=bytes(8), peer_bytes=10)
GONE = jobs.JobDone(SourceUnavailable.code, "it is gone")
DAMAGED = jobs.JobDone(CorruptData.code, "it is damaged")
SOURCE = Located("", "")
EXTENT = ExtentId(bytes(16))
DESCRIPTORS = 3
"""Those of a fill that other nodes may follow."""


class Disk(RamTier):
    """Memory that the daemon takes for a disk."""

    def recover(self) -> dict[ExtentId, int]:
        return {}


class Bench:
    """Fills over tiers, lanes, fillers and a cluster that each end their calls when the test says so."""

    def __init__(
        self, folder: Path, tier: TierName, cluster: bool, answers: Sequence[object], share: float = 0.0
    ) -> None:
        """`share`: the part of the extents from nodes that is compared with the source."""
        self.tier = tier
        self.events: list[events.Event] = []
        self.calls: list[Callable[[], None]] = []
        """Calls under way, in the order in which they began; running one ends it."""
        self.verdicts: list[Verdict] = []
        self.told: list[tuple[str, bool]] = []
        """The nodes that were told of a wrong copy, and whether it differs from the source."""
        self._answers = list(answers)
        """The results of calls to fillers and to the cluster; GOOD and SOURCE after these."""
        self.tiers = {RAM: RamTier(), DISK: Disk(DISK), ORIGIN: Disk(ORIGIN)}
        self.memory = FillMemory(10, 10, None)
        anything: Any = None
        self.datasets = Datasets(str(folder), anything, anything, anything)
        self.dataset = self.datasets.admit(dataset(1))
        self.extent = self.dataset.extent_ids[0]
        node = Node([TierSpec(each, 1000) for each in self.tiers], NodeSettings())
        lanes: Any = dict.fromkeys(self.tiers, SimpleNamespace(submit=self._call))
        fillers: Any = SimpleNamespace(submit=self._fetch, source_requests=SourceCounters())
        handle, holes = self.events.append, HoleRecords(lambda: 0.0)
        checks = Checks(node, self.tiers, lanes, fillers, handle, lambda _: None)
        commits, locate = Commits(lanes, lanes), self._locate if cluster else None
        shared, preparers = SharedFills(), Preparers(handle, lambda: 0.0)
        self.fills = Fills(
            FillParts(
                self.tiers, lanes, commits, self.datasets, fillers, checks, holes, handle, self.memory, shared, preparers,
                locate, SentBytes(share, node, handle, lambda: ["a", "b"], lambda: 0), self._told, self.verdicts.extend,
            )
        )  # fmt: skip

    def _told(self, node: str, extent: ExtentId, differs: bool) -> None:
        self.told.append((node, differs))

    def _call(self, work: Callable[[], Any], then: Callable[[Any], None], _: object) -> None:
        self.calls.append(lambda: then(work()))

    def _fetch(self, _: jobs.Job, fds: Sequence[int], then: Callable[[Any], None], tiers: object) -> None:
        for fd in fds:
            os.fstat(fd)
        self.calls.append(lambda: then(self._answers.pop(0) if self._answers else GOOD))

    def _locate(
        self,
        extent: ExtentId,
        failed: tuple[str, ...],
        late: tuple[str, ...],
        then: Callable[[Located], None],
    ) -> None:
        self.calls.append(lambda: then(cast("Located", self._answers.pop(0)) if self._answers else SOURCE))

    def start(self, origin: TierName | None = None) -> None:
        if origin is not None:
            os.close(self.tiers[origin].reserve(self.extent, 10))
            self.tiers[origin].commit(self.extent, Checksums(10, bytes(8)))
        self.fills.start(commands.StartFill(self.extent, self.tier, origin))

    def end_calls(self, most: int = 100) -> int:
        """End calls in their order, also those that these begin; return how many there were."""
        ended = 0
        while self.calls and ended < most:
            self.calls.pop(0)()
            ended += 1
        return ended

    def close(self) -> None:
        self.datasets.close()
        for tier in self.tiers.values():
            tier.close()


@pytest.mark.parametrize(
    ("tier", "cluster", "origin", "answers"),
    [
        pytest.param(RAM, False, None, [], id="source"),
        pytest.param(RAM, True, None, [], id="source of a cluster"),
        pytest.param(RAM, True, None, [Located("b", "b:1"), FROM_NODE], id="node"),
        pytest.param(RAM, True, None, [Located("b", "b:1"), GONE], id="node fails"),
        pytest.param(RAM, True, None, [Located("b", "b:1", compare=True), FROM_NODE], id="node is compared"),
        pytest.param(DISK, False, None, [], id="disk"),
        pytest.param(DISK, False, None, [DAMAGED], id="source fails"),
        pytest.param(RAM, False, ORIGIN, [], id="lower tier"),
    ],
)
def test_a_tier_lost_at_any_step_is_answered_once_and_leaves_nothing(
    tmp_path: Path, tier: TierName, cluster: bool, origin: TierName | None, answers: list[object]
) -> None:
    def lost_after(calls: int) -> bool:
        """Lose the tier after this number of calls; return whether the fill had ended before."""
        with closing(Bench(tmp_path, tier, cluster, answers)) as bench:
            bench.start(origin)
            bench.end_calls(calls)
            ended, told = not bench.fills.under_way, len(bench.events)
            bench.fills.tier_lost(origin or tier, "it hangs")
            lost = bench.events[told:]
            failed = [isinstance(each, (events.FillFailed, events.CommitFailed)) for each in lost]
            assert failed == ([] if ended else [True])
            bench.end_calls()
            assert bench.events[told:] == lost, "the results of calls under way change nothing"
            assert not bench.fills.under_way
            bench.memory.begin(10, lambda: bench.calls.append(lambda: None))
            assert bench.calls, "all of the memory is free again"
        return ended

    before, calls = descriptors(), 0
    while not lost_after(calls):
        assert descriptors() == before
        calls += 1
    assert calls > 2


OTHER = jobs.JobDone(digests=b"\1" * 8, source_bytes=10)
"""Other bytes than a node sent."""
NODE, SUSPECT = Located("b", "b:1"), Located("b", "b:1", compare=True)


def filled(folder: Path, share: float, *answers: object) -> Bench:
    """A bench after one fill, whose copy may be granted."""
    with closing(Bench(folder, RAM, True, answers, share)) as bench:
        bench.start()
        bench.end_calls()
        assert isinstance(bench.events[-1], events.Filled)
        return bench


@pytest.mark.parametrize(("share", "found"), [(1.0, NODE), (0.0, SUSPECT)])
def test_what_a_node_sent_is_compared_before_it_is_granted(
    tmp_path: Path, share: float, found: Located
) -> None:
    bench = filled(tmp_path, share, found, FROM_NODE, GOOD)
    assert bench.events == [events.Filled(bench.extent, RAM, True)]
    assert [(each.node, each.compared, each.failure) for each in bench.verdicts] == [("b", True, "")]
    assert bench.fills.counts.source_bytes(bench.dataset.id) == GOOD.source_bytes


def test_nothing_is_compared_where_the_share_is_nothing(tmp_path: Path) -> None:
    bench = filled(tmp_path, 0.0, NODE, FROM_NODE)
    assert bench.fills.counts.source_bytes(bench.dataset.id) == 0
    assert not bench.verdicts[0].compared


def test_a_node_that_sent_wrong_bytes_is_named_told_and_replaced_by_the_source(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bench = filled(tmp_path, 1.0, NODE, FROM_NODE, OTHER, SOURCE, OTHER)
    assert bench.events[-1] == events.Filled(bench.extent, RAM, False)
    assert [(each.node, each.wrong) for each in bench.verdicts] == [("", False), ("b", True)]
    assert bench.told == [("b", True)]
    assert [each.__dict__.get("node") for each in caplog.records if "wrong bytes" in each.message] == ["b"]


def test_a_node_whose_bytes_do_not_match_a_stated_hash_is_blamed_too(tmp_path: Path) -> None:
    unlike = jobs.JobDone(
        CorruptData.code, "another hash", digests=bytes(8), peer_bytes=10, end=ReadEnd.WRONG
    )
    bench = filled(tmp_path, 0.0, NODE, unlike, SOURCE, OTHER)
    assert [(each.node, each.wrong) for each in bench.verdicts] == [("", False), ("b", True)]
    assert bench.told == [("b", True)]


def test_nobody_is_blamed_where_this_nodes_own_reads_of_the_source_differ(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bench = filled(tmp_path, 1.0, NODE, FROM_NODE, OTHER, SOURCE, GOOD)
    assert [each.node for each in bench.verdicts] == [""]
    assert bench.told == []
    assert "two reads of the source differ" in caplog.text


def test_of_several_nodes_none_is_blamed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    part = jobs.JobDone(SourceUnavailable.code, "it ended", peer_bytes=5, end=ReadEnd.FAILED)
    second = [Located("c", "c:1"), FROM_NODE, OTHER, SOURCE, OTHER]
    bench = filled(tmp_path, 1.0, NODE, part, *second)
    assert [each.node for each in bench.verdicts if each.wrong] == []
    assert "one of several nodes sent wrong bytes" in caplog.text


def test_a_source_that_gives_nothing_to_compare_with_fails_no_read(tmp_path: Path) -> None:
    bench = filled(tmp_path, 1.0, NODE, FROM_NODE, GONE)
    assert bench.events == [events.Filled(bench.extent, RAM, True)]
    assert not bench.verdicts[0].compared


def test_a_node_that_sent_wrong_bytes_before_is_not_believed_uncompared(tmp_path: Path) -> None:
    bench = filled(tmp_path, 0.0, SUSPECT, FROM_NODE, GONE, SOURCE, GOOD)
    assert bench.events == [events.Filled(bench.extent, RAM, False)]


def test_bytes_that_come_late_are_counted(tmp_path: Path) -> None:
    with closing(Bench(tmp_path, DISK, False, [])) as bench:
        bench.start()
        bench.end_calls(1)
        bench.fills.tier_lost(DISK, "it hangs")
        bench.end_calls()
        assert bench.fills.counts.source_bytes(bench.dataset.id) == GOOD.source_bytes


def test_a_fill_that_this_node_cannot_make_is_an_event_of_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    full = jobs.JobDone(OutOfSpace.code, "no memory", retry=True)
    with closing(Bench(tmp_path, RAM, False, [full, DAMAGED])) as bench:
        for _ in range(2):
            bench.start()
            bench.end_calls()
    found = [(each.__dict__["event"], each.__dict__["error"]) for each in caplog.records]
    assert found == [("fill_failed", "OutOfSpace"), ("source_failed", "CorruptData")]


@contextmanager
def few_descriptors(spare: int) -> Iterator[None]:
    """Let this process open only `spare` more descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.open("/dev/null", os.O_RDONLY)]
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 8, hard))
        try:
            while True:
                taken.append(os.dup(taken[0]))
        except OSError:
            pass
        for _ in range(spare):
            os.close(taken.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in taken:
            os.close(fd)


@pytest.mark.parametrize("spare", range(DESCRIPTORS))
def test_a_fill_that_cannot_be_shared_leaves_no_descriptor(spare: int) -> None:
    fills, target = SharedFills(), os.memfd_create("target")
    before = descriptors()
    with few_descriptors(spare), pytest.raises(OSError, match="Too many open files"):
        fills.begin(EXTENT, RAM, 1, target)
    assert descriptors() == before
    with few_descriptors(DESCRIPTORS):
        fills.end(fills.begin(EXTENT, RAM, 1, target))
    assert descriptors() == before
    os.close(target)
