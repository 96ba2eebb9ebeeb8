"""The record of one connection of a reader."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cachesvc.core.model import ExtentId
from cachesvc.core.records.pre_restart_holds import Hold

if TYPE_CHECKING:
    from cachesvc.core.records.cache_entry import Copy


@dataclass(slots=True, eq=False)
class ReaderState:
    """A reader's leases, waits and holds."""

    job: int = 0
    """The job whose turn its demands take in the fair queue."""
    leases: dict[ExtentId, list[Copy]] = field(default_factory=dict)
    waiting: dict[ExtentId, int] = field(default_factory=dict)
    """Unanswered requests of each extent."""
    held: dict[ExtentId, Hold] = field(default_factory=dict)
    recalls: int = 0
    """Recalls sent since the reader's last release."""
