"""What the plans of one order share of the window, and whose turn it is to fetch ahead in it.

Where orders are too many for an extent each, those whose plans have passed nothing for a while (suspended, at a
validation) count no more: what they have ahead gives way to the others, and they fetch nothing before they move again.
"""

from __future__ import annotations

from collections.abc import Sequence

from cachesvc.core.model import ExtentId
from cachesvc.core.moment import Moment
from cachesvc.core.reserve import Reserve
from cachesvc.core.state import Plan, Window

FIRST_ENTRIES = 64
"""Entries by which an order is known: those of its first step, and not more of them than this."""
REST_S = 30.0
"""An order that has passed nothing for so long rests. One that is only slow waits for one fill in that time."""


class Windows:
    """Windows by the extents that an order begins with, while it has plans."""

    def __init__(self, reserve: Reserve, moment: Moment) -> None:
        self._reserve = reserve
        self._moment = moment
        self._windows: dict[frozenset[ExtentId], Window] = {}
        self._turn = 0

    def join(self, number: int, entries: Sequence[tuple[ExtentId, int, int]]) -> Window:
        """The window of a plan that begins."""
        rows = entries[:FIRST_ENTRIES]
        first = frozenset(extent for extent, step, _ in rows if step == entries[0][1])
        window = self._windows.setdefault(first, Window())
        window.plans.add(number)
        window.moved_at = self._moment.now
        return window

    def leave(self, plan: Plan) -> None:
        """A plan has ended."""
        plan.shared.plans.discard(plan.number)
        self._windows = {first: each for first, each in self._windows.items() if each.plans}
        self._retune()

    def measured(self, window: Window, open_bytes: int, absent_bytes: int) -> None:
        """A plan reads so much side by side, of which so much is not kept."""
        window.open_bytes = max(window.open_bytes, open_bytes)
        window.absent_bytes = max(window.absent_bytes, absent_bytes)
        self._retune()

    def fetched(self, window: Window) -> None:
        """A window had its turn."""
        self._turn = window.turn = self._turn + 1

    def has_room(self, window: Window, size_bytes: int) -> bool:
        """Whether so much more may be ahead in a window: within its part, or, where orders are too many for parts of an
        extent, the only extent in it. What those have that take no part must have gone before."""
        every, ahead, taking = self._reserve.ahead_bytes(), window.ahead_bytes, len(self.taking())
        in_part = ahead + size_bytes <= every // taking
        if in_part and taking == len(self._windows):
            return True
        left = every - sum(each.ahead_bytes for each in self._windows.values())
        return size_bytes <= left and (in_part or not ahead)

    def taking(self) -> set[Window]:
        """Those that share the room: all, or, where that is less than an extent for each, all that move."""
        windows, reserve = set(self._windows.values()), self._reserve
        enough = len(windows) * reserve.largest_bytes <= reserve.ahead_bytes()
        if enough or reserve.tight or not reserve.streams:
            return windows
        since = self._moment.now - REST_S
        return {each for each in windows if each.moved_at > since} or windows

    def gives_way(self) -> Window | None:
        """Of those with something ahead that take no part, the one that moved last longest ago."""
        taking = self.taking()
        others = (each for each in self._windows.values() if each.ahead and each not in taking)
        return min(others, key=lambda each: each.moved_at, default=None)

    def room_bytes(self) -> int:
        """How much one window may have ahead: its part, or an extent where there is room for that."""
        every = self._reserve.ahead_bytes()
        return max(every // len(self.taking()), min(every, self._reserve.largest_bytes))

    def _retune(self) -> None:
        every = self._windows.values()
        self._reserve.reads(sum(each.open_bytes for each in every), sum(each.absent_bytes for each in every))
