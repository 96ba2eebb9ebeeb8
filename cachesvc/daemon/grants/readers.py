"""What the grants socket knows of a reader, and what it and the runner say to each other."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from cachesvc.config import Rule
from cachesvc.core import events
from cachesvc.core.errors import CacheError
from cachesvc.core.model import DatasetId, ExtentId, ReaderId
from cachesvc.core.stalls import StallReport
from cachesvc.daemon.access.tenants import Peer
from cachesvc.daemon.grants.plans import Entries, Handed

NO_DATASET = DatasetId("")


class Known(Protocol):
    """A dataset as the grants socket sees it."""

    @property
    def id(self) -> DatasetId: ...

    @property
    def rules(self) -> frozenset[Rule]: ...

    @property
    def extent_ids(self) -> tuple[ExtentId, ...]: ...

    @property
    def sizes(self) -> tuple[int, ...]: ...

    @property
    def index_of(self) -> dict[ExtentId, int]: ...

    @property
    def catalog_fd(self) -> int: ...


class Answers(Protocol):
    """What the runner does when readers speak."""

    def connected(
        self, reader: ReaderId, dataset: DatasetId, then: Callable[[Known | CacheError], None]
    ) -> None:
        """Load and declare a dataset for a reader."""
        ...

    def rooms(self) -> list[int]:
        """Bytes that each tier may hold."""
        ...

    def handle(self, event: events.Event) -> None: ...

    def held(self, reader: ReaderId, extent: ExtentId, size_bytes: int) -> None: ...

    def suspected(self, extent: ExtentId) -> None: ...

    def waited(self, dataset: DatasetId, report: StallReport) -> None: ...

    def planned(self, reader: ReaderId, plan: Entries) -> None: ...

    def passed_or_gone(self, reader: ReaderId, step: int | None) -> None:
        """The reader's plan moved on to `step`; None: the reader is gone."""
        ...


@dataclass(slots=True)
class Reader:
    """One connection to the grants socket."""

    id: ReaderId
    channel: socket.socket
    peer: Peer
    token: int = field(repr=False)
    """Says who calls the control API; known to this connection alone, so never logged."""
    greeted: bool = False
    wanted: DatasetId = NO_DATASET
    dataset: Known | None = None
    plan: Handed | None = None
    """Being read: what this reader says after it is heard after it."""
    knows_holes: bool = False
    """Its release does not take what lies in a hole for data."""
    launch: int = 0
    job: int = 0
    """Whose turn its demands take; nobody stands in another user's line. 0: its own."""
    unread: int = 0
    """Descriptors that it was sent and may not have read."""

    def belongs(self, launch: int) -> None:
        """To the readers of one job, which say the same."""
        self.launch = launch
        self.job = (self.peer.uid + 1) << 64 | launch if launch else 0


@dataclass(frozen=True, slots=True)
class Connection:
    """A reader's connection as one daemon gives it to another. `wanted` is empty where it reads nothing."""

    id: ReaderId
    token: int = field(repr=False)
    descriptor: int
    greeted: bool
    wanted: DatasetId
    welcomed: bool
    launch: int
    knows_holes: bool
