"""A filler's answer that comes after the readers have left and the dataset was unloaded."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from cachesvc.core import commands, events
from cachesvc.core.model import ReaderId, TierName
from cachesvc.core.node.node import Node
from cachesvc.core.tiering.policy import NodeSettings, TierSpec
from cachesvc.daemon.datasets import (
    MAX_UNUSED,
    Datasets,
    in_use,
    is_claimed,
)
from cachesvc.daemon.fills.checks import Checks
from cachesvc.daemon.fills.commits import Commits
from cachesvc.daemon.fills.fill_memory import FillMemory
from cachesvc.daemon.fills.fills import Fills
from cachesvc.daemon.fills.holes import HoleRecords
from cachesvc.daemon.fills.shared_fills import SharedFills
from cachesvc.daemon.processes import jobs
from tests.support.served_datasets import dataset

NVME = TierName("nvme0")


class AtOnce:
    """A lane that runs each call at once."""

    def submit(self, work: Callable[[], Any], then: Callable[[Any], None], _: Callable[[Any], None]) -> None:
        then(work())


def test_a_late_answer_is_counted_and_has_no_other_effect(tmp_path: Path) -> None:
    node = Node([TierSpec(NVME, 1000)], NodeSettings())
    anything: Any = None
    datasets = Datasets(str(tmp_path), anything, anything, anything, anything)
    datasets.claimed, datasets.used = partial(is_claimed, node), partial(in_use, node)
    answers: list[Callable[[jobs.Answer], None]] = []
    tier: Any = SimpleNamespace(
        reserve=lambda *_: os.open("/dev/null", os.O_RDONLY), abort=lambda _: None, recover=dict, hold=None
    )
    fillers: Any = SimpleNamespace(submit=lambda job, fds, then, tiers: answers.append(then))
    lanes: Any = {NVME: AtOnce()}

    def handle(event: events.Event) -> None:
        for command in node.handle(event, 0.0):
            if isinstance(command, commands.StartFill):
                fills.start(command)

    checks = Checks(node, {NVME: tier}, lanes, fillers, handle, suspect_tier=lambda _: None)
    fills = Fills(
        {NVME: tier},
        lanes,
        Commits(lanes, lanes),
        datasets,
        fillers,
        checks,
        HoleRecords(lambda: 0.0),
        handle,
        FillMemory(1 << 40, 1 << 40, None),
        SharedFills(),
    )
    known = datasets.admit(dataset(1))
    handle(events.DatasetDeclared(7, known.id, known.extents))
    handle(events.Demanded(ReaderId(7), 1, known.extent_ids[0]))
    handle(events.TierLost(NVME))
    fills.tier_lost(NVME, "it hangs")
    handle(events.ReaderGone(ReaderId(7)))
    handle(events.JobEnded(7))
    for number in range(MAX_UNUSED + 1):
        datasets.admit(dataset(2 + number))
    assert datasets.known(known.id) is None
    (late,) = answers
    late(jobs.JobDone(1, 0, "", source_bytes=10))
    assert fills.source_bytes(known.id) == 10
    assert node.where(known.extent_ids[0]) is None
    datasets.close()
