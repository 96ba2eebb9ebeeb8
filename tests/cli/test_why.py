"""`cachesvc why` names the planted cause, with evidence in at most three lines and one change."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cachesvc.__main__ import run
from cachesvc.cli import why
from cachesvc.cli.diagnosis import CAUSES, Finding, Situation, diagnose
from cachesvc.v1 import cachesvc_pb2 as pb
from tests.support.canned import CannedCache, canned_daemon

CORES = 8
ID = "d" * 32


def node(*waits: tuple[str, float], workers: int = 3) -> pb.StatusReply:
    """A node with 100 GiB of data, 20 GiB of cache, and a rank that waits; the source is read evenly in a later epoch."""
    found = pb.StatusReply(node="here", now_s=1000, readers=1 + workers)
    found.tiers.add(name="ram", budget_bytes=10 << 30, used_bytes=10 << 30)
    found.tiers.add(name="nvme0", budget_bytes=10 << 30, used_bytes=10 << 30)
    row = found.datasets.add(readers=1 + workers, hit_rate=0.19, bound=0.2, resident_bytes=20 << 30)
    row.dataset.id, row.dataset.uri, row.dataset.size_bytes = ID, "s3://b/data/", 100 << 30
    row.epochs.add(number=3, touched=10, hit_rate=0.19, bound=0.2)
    found.history.step_s = 5
    found.history.source.extend([100 << 20] * 120)
    found.throughput.source = 100 << 20
    found.throughput.nvme = 2 << 30
    job = found.jobs.add(
        id="job1", readers_connected=1 + workers, batches_per_s=5, waiting=sum(part for _, part in waits)
    )
    rank = job.readers.add(pid=1, dataset=ID, batches_per_s=5)
    for cause, part in waits:
        rank.waits.add(cause=cause, share=part)
    for worker in range(workers):
        job.readers.add(pid=2 + worker, dataset=ID, step=3, steps=9)
    return found


def cause_of(now: pb.StatusReply, before: pb.StatusReply | None = None) -> Finding:
    if before is None:
        before = pb.StatusReply()
        before.CopyFrom(now)
        before.now_s = now.now_s - 5
    found = diagnose(Situation(before, now, now.jobs[0], CORES))
    assert found.cause in CAUSES
    assert 1 <= len([line for line in found.evidence if line]) <= 3
    assert found.change
    return found


def small_cache(_: pb.StatusReply) -> None:
    """As it is: all that comes is read once, evenly."""


def small_window(now: pb.StatusReply) -> None:
    now.history.source[-12:] = [200 << 20, 0, 0, 0] * 3


def cold(now: pb.StatusReply) -> None:
    now.datasets[0].epochs[0].number = 0
    now.history.source[-12:] = [200 << 20, 0, 0, 0] * 3


def full_link(now: pb.StatusReply) -> None:
    now.datasets[0].epochs[0].number = 0


def throttled(now: pb.StatusReply) -> None:
    now.sources.throttled, now.sources.requests = 40, 100


def failing(now: pb.StatusReply) -> None:
    now.events.add(kind="source_failed", time=now.now_s - 10, words="a source failed: s3://b/data/")


@pytest.mark.parametrize(
    ("plant", "cause", "change"),
    [
        (small_cache, "small cache", "80.0 GiB more"),
        (small_window, "small window", "window="),
        (cold, "cold cache", "cachesvc prefetch s3://b/data/"),
        (full_link, "full link", "cachesvc prefetch s3://b/data/"),
        (throttled, "throttling", "more requests"),
        (failing, "source fails", "cachesvc events"),
    ],
)
def test_a_wait_for_the_source(plant: Callable[[pb.StatusReply], None], cause: str, change: str) -> None:
    now, before = node(("source", 0.4), ("decode", 0.1)), node()
    plant(now)
    before.now_s = now.now_s - 5
    found = cause_of(now, before)
    assert (found.cause, found.part) == (cause, 0.4)
    assert change in found.change
    assert "40 % source, 10 % decode" in found.evidence[0]


def test_a_wait_for_a_slow_node_names_it() -> None:
    now = node(("peer", 0.3))
    for name, rate in (("here", 0), ("a", 900 << 20), ("b", 50 << 20), ("c", 800 << 20)):
        now.nodes.add(name=name, me=name == "here", state="present", bytes_per_s=rate)
    now.fills.add(dataset=ID, reads="b", tier="ram")
    assert (cause_of(now).cause, "node b" in cause_of(now).says) == ("slow node", True)
    now.nodes[2].bytes_per_s = 850 << 20
    assert cause_of(now).cause == "network"
    now.nodes[2].state = "slow"
    assert "look at b" in cause_of(now).change


def test_a_wait_for_a_disk_is_its_own_or_lacks_ram() -> None:
    now = node(("disk", 0.3))
    assert cause_of(now).cause == "little RAM"
    assert "--ram: 100.0 GiB" in cause_of(now).change
    now.throughput.nvme = 50 << 20
    assert cause_of(now).cause == "slow disk"
    now.tiers[1].stalled = True
    assert "nvme0" in cause_of(now).says
    del now.tiers[1]
    assert "local files" in cause_of(now).says


def test_decoding_wants_workers_while_cores_are_free() -> None:
    assert cause_of(node(("decode", 0.5), workers=1)).cause == "few workers"
    assert "num_workers=7" in cause_of(node(("decode", 0.5), workers=1)).change
    assert cause_of(node(("decode", 0.5), workers=7)).cause == "decoding"


def test_other_causes() -> None:
    assert cause_of(node(("transfer", 0.2))).cause == "transfer"
    assert cause_of(node(("hand-over", 0.2))).cause == "hand-over"
    assert cause_of(node(("source", 0.02))).cause == "nothing"
    assert cause_of(node()).cause == "nothing"


def test_a_reader_that_is_stuck_counts_before_its_rank_reports() -> None:
    now = node()
    now.jobs[0].readers[1].waiting_s, now.jobs[0].readers[1].waits_for = (
        60,
        "a slot or room for a fill, 1 extent",
    )
    assert cause_of(now).cause == "room"
    now.jobs[0].readers[1].waits_for = "node a, 1 extent for 60 s"
    now.nodes.add(name="a", state="slow")
    now.fills.add(dataset=ID, reads="a", tier="ram")
    assert (cause_of(now).cause, round(cause_of(now).part, 2)) == ("slow node", 0.92)
    now.fills[0].reads = "source"
    assert cause_of(now).cause == "small cache"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CannedCache]:
    monkeypatch.setenv("CACHESVC_SOCKET", str(tmp_path))
    monkeypatch.setattr(why, "BETWEEN_S", 0)
    with canned_daemon(tmp_path) as servicer:
        yield servicer


def test_the_verb_prints_a_line_for_the_cause_its_evidence_and_the_change(
    cache: CannedCache, capsys: Any
) -> None:
    assert run(["why"]) == 4
    assert "no job reads on this node" in capsys.readouterr().err
    cache.status = node(("source", 0.4))
    assert run(["why"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "job job1 waits for what the cache has no room for: 40 % of its time"
    assert lines[-1].startswith("  change: give the cache 80.0 GiB more")
    assert len(lines) == 5
    assert run(["why", "--json", "job"]) == 0
    assert json.loads(capsys.readouterr().out)["cause"] == "small cache"
    assert run(["why", "nonsense"]) == 4
    assert "jobs: job1" in capsys.readouterr().err
