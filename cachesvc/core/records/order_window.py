"""The window that the plans of one order share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cachesvc.core.records.cache_entry import Copy
    from cachesvc.core.tiering.retention import Retention


@dataclass(slots=True, eq=False)
class OrderWindow:
    """Extents that the plans of one order have fetched ahead. Ranks that read the same extents side by side share one
    window, for they need each extent once."""

    user: int = -1
    plans: set[int] = field(default_factory=set)
    open_bytes: int = 0
    """The most bytes of extents that the order reads side by side."""
    absent_bytes: int = 0
    """The part of `open_bytes` that was not kept when the order began."""
    ahead_bytes: int = 0
    """Fetched ahead by these plans, or on the way, and not yet read."""
    ahead: dict[Copy, None] = field(default_factory=dict)
    """Those copies, in the order in which their fills began."""
    moved_at: float = 0.0
    """When one of its plans last began, or passed an entry."""
    turn: int = 0
    """When it last fetched ahead: of orders that are equally urgent, the one that waited longest is first."""
    retention: Retention | None = None
