"""Plans in shared memory, and a core that lists what arrives."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cachesvc.config import Rule
from cachesvc.core.model import DatasetId, ExtentId, ReaderId
from cachesvc.daemon.grants.plans import Entries

EXTENT, EXTENTS = 4096, 16
IDS = tuple(ExtentId(bytes([number])) for number in range(EXTENTS))


def memory(body: bytes) -> int:
    fd = os.memfd_create("plan")
    os.write(fd, body)
    return fd


class Held:
    """A lane that does what it is told one by one, when asked to."""

    def __init__(self) -> None:
        self.calls: list[tuple[Callable[[], Any], Callable[[Any], None]]] = []

    def submit(self, work: Callable[[], Any], then: Callable[[Any], None], otherwise: object) -> None:
        self.calls.append((work, then))

    def run(self) -> None:
        work, then = self.calls.pop(0)
        then(work())


@dataclass
class Known:
    """A dataset, as the grants socket sees it."""

    id: DatasetId
    extent_ids: tuple[ExtentId, ...] = IDS
    sizes: tuple[int, ...] = (EXTENT,) * EXTENTS
    index_of: dict[ExtentId, int] = field(default_factory=dict)
    rules: frozenset[Rule] = frozenset()
    catalog_fd: int = -1


class Listed:
    """What a daemon's core is told of plans."""

    def __init__(self) -> None:
        self.told: list[object] = []

    def planned(self, reader: ReaderId, plan: Entries) -> None:
        self.told.append((reader, len(plan.entries)))

    def handle(self, event: object) -> None:
        self.told.append(event)

    def passed_or_gone(self, reader: ReaderId, step: int | None) -> None:
        pass
