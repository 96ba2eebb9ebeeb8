"""A reader's connection, and what the grants socket and the runner ask of each other."""

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
from cachesvc.daemon.grants.plan_intake import PlanEntries, ReceivedPlan

NO_DATASET = DatasetId("")


class GrantableDataset(Protocol):
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


class ReaderRequests(Protocol):
    """Does what readers request. `daemon/reader_events.py` implements it."""

    def connected(
        self, reader: ReaderId, dataset: DatasetId, then: Callable[[GrantableDataset | CacheError], None]
    ) -> None:
        """Load and declare a dataset for a reader."""
        ...

    def tier_budgets(self) -> list[int]:
        """Return the bytes that each working tier may hold."""
        ...

    def handle(self, event: events.Event) -> None: ...

    def held(self, reader: ReaderId, extent: ExtentId, size_bytes: int) -> None: ...

    def suspected(self, extent: ExtentId) -> None: ...

    def waited(self, dataset: DatasetId, report: StallReport) -> None: ...

    def planned(self, reader: ReaderId, plan: PlanEntries) -> None: ...

    def gone(self, reader: ReaderId) -> None:
        """End the leases, plan and claim of a reader whose connection has ended."""
        ...


@dataclass(slots=True)
class ConnectedReader:
    """One connection to the grants socket."""

    id: ReaderId
    channel: socket.socket
    peer: Peer
    token: int = field(repr=False)
    """Identifies the caller at the control API. Only this connection is told the token, so it is never logged."""
    greeted: bool = False
    wanted: DatasetId = NO_DATASET
    dataset: GrantableDataset | None = None
    plan: ReceivedPlan | None = None
    """The plan that is being read. Later messages of this reader wait until that is done."""
    knows_holes: bool = False
    """Its release does not take the bytes of a hole for data."""
    launch: int = 0
    job: int = 0
    """The fair queue's key for its demands: its user and launch. 0: the reader alone."""

    def join_job(self, launch: int) -> None:
        """Join the readers of one job, which send the same `launch`."""
        self.launch = launch
        self.job = (self.peer.uid + 1) << 64 | launch if launch else 0
