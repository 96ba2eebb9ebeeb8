"""Memory of plans, and stand-ins for the lane, dataset and runner of a grants socket."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cachesvc.config import Rule
from cachesvc.core.model import DatasetId, ExtentId
from cachesvc.daemon.grants.plan_intake import PlanEntries
from cachesvc.daemon.grants.replies import ConnectedReader

EXTENT, EXTENTS = 4096, 16
IDS = tuple(ExtentId(bytes([number])) for number in range(EXTENTS))


def memory(body: bytes) -> int:
    fd = os.memfd_create("plan")
    os.write(fd, body)
    return fd


class ManualLane:
    """A lane that runs its calls one by one, each on `run`."""

    def __init__(self) -> None:
        self.calls: list[tuple[Callable[[], Any], Callable[[Any], None]]] = []

    def submit(self, work: Callable[[], Any], then: Callable[[Any], None], otherwise: object) -> None:
        self.calls.append((work, then))

    def run(self) -> None:
        work, then = self.calls.pop(0)
        then(work())


@dataclass
class FakeDataset:
    """A dataset, as the grants socket sees it."""

    id: DatasetId
    extent_ids: tuple[ExtentId, ...] = IDS
    sizes: tuple[int, ...] = (EXTENT,) * EXTENTS
    index_of: dict[ExtentId, int] = field(default_factory=dict)
    rules: frozenset[Rule] = frozenset()
    catalog_fd: int = -1


class RecordedRequests:
    """Records the plans and events that the grants socket passes on."""

    def __init__(self) -> None:
        self.received: list[object] = []

    def planned(self, reader: ConnectedReader, plan: PlanEntries) -> None:
        self.received.append((reader.id, len(plan.entries)))

    def handle(self, event: object) -> None:
        self.received.append(event)

    def gone(self, reader: ConnectedReader) -> None:
        pass

    def connected(
        self, reader: ConnectedReader, dataset: DatasetId, then: Callable[[FakeDataset], None]
    ) -> None:
        then(FakeDataset(dataset))

    def tier_budgets(self) -> list[int]:
        return []
