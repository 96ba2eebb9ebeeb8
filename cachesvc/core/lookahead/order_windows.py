"""Shares the window among orders, and decides which order fetches ahead next.

The room is shared out by user, and a user's part by order. So another user's part is the same however many plans one user
has. A user who reads more side by side than its part holds has no room (`core/tiering/stream_window.py`). Where there
are more orders than extents fit the room, orders whose plans have not moved for a while (suspended, at a validation)
are idle and have no part. Extents that they fetched ahead are freed for others, and they fetch nothing until they move
again. The same holds for users.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from cachesvc.core.model import ExtentId
from cachesvc.core.records.event_context import EventContext
from cachesvc.core.records.residency import Ahead
from cachesvc.core.tiering.retention import Retention
from cachesvc.core.tiering.stream_window import Reserve

FIRST_ROWS = 64
"""Rows that identify an order: those of its first step, and not more of them than this."""
IDLE_S = 30.0
"""An order that has passed nothing for so long is idle. A slow one waits for one fill in that time."""


@dataclass(slots=True, eq=False)
class OrderWindow:
    """The window that the plans of one order share: ranks that read the same extents side by side need each once."""

    user: int = -1
    plans: set[int] = field(default_factory=set)
    open_bytes: int = 0
    """The most bytes of extents that the order reads side by side."""
    absent_bytes: int = 0
    """The part of `open_bytes` that was not kept when the order began."""
    ahead: Ahead = field(default_factory=Ahead)
    moved_at: float = 0.0
    """When one of its plans last began, or passed an entry."""
    served_at: int = 0
    """The number of its last fill ahead: of orders that are equally urgent, the one that waited longest is first."""
    retention: Retention | None = None


class OrderWindows:
    """Windows by user and by the extents with which an order begins, while the order has plans."""

    def __init__(self, reserve: Reserve, context: EventContext) -> None:
        self._reserve = reserve
        self._context = context
        self._users: dict[int, dict[frozenset[ExtentId], OrderWindow]] = {}
        self._served_count = 0
        self._served_at: dict[int, int] = {}

    def join(self, number: int, entries: Sequence[tuple[ExtentId, int, int]], user: int) -> OrderWindow:
        """The window that a new plan shares."""
        rows = entries[:FIRST_ROWS]
        first = frozenset(extent for extent, step, _ in rows if step == entries[0][1])
        window = self._users.setdefault(user, {}).setdefault(first, OrderWindow(user))
        window.plans.add(number)
        window.moved_at = self._context.now
        return window

    def leave(self, window: OrderWindow, number: int) -> None:
        """Remove a plan that has ended."""
        user = window.user
        window.plans.discard(number)
        remaining = {first: each for first, each in self._users.pop(user).items() if each.plans}
        if remaining:
            self._users[user] = remaining
        else:
            self._served_at.pop(user, None)
        self._retune()

    def note_reads(self, window: OrderWindow, open_bytes: int, absent_bytes: int) -> None:
        """Note how many bytes a plan reads side by side, and how many of them are not kept."""
        window.open_bytes = max(window.open_bytes, open_bytes)
        window.absent_bytes = max(window.absent_bytes, absent_bytes)
        self._retune()

    def note_fetched(self, window: OrderWindow) -> None:
        """Note that a window fetched ahead."""
        self._served_count = window.served_at = self._served_at[window.user] = self._served_count + 1

    def served_at(self, user: int) -> int:
        """The number of the user's last fill among all users'. The user with the lowest is served first."""
        return self._served_at.get(user, 0)

    def has_room(self, window: OrderWindow, size_bytes: int) -> bool:
        """Return whether `size_bytes` more may be ahead in a window: within its part or, where parts are smaller than an
        extent, as its only extent. What idle orders and users have ahead must be freed first."""
        mine, active = self._of(window.user), self._active_of(window.user)
        room, ahead = self._room_bytes(window.user), window.ahead.size_bytes
        if self._crowded(size_bytes):
            return False
        in_part = ahead + size_bytes <= room // len(active)
        if in_part and len(active) == len(mine):
            return True
        left = room - _ahead_bytes(mine)
        return size_bytes <= left and (in_part or not ahead)

    def active(self) -> set[OrderWindow]:
        """Windows that may fetch ahead: all, or, where the room is less than an extent for each, those that are not idle.
        Those of a user without room keep what there is room to keep."""
        sharing = self._sharing()
        return {
            each
            for user in self._users
            if user in sharing or self._reserve.oversubscribed_by(user)
            for each in self._active_of(user)
        }

    def window_to_free(self, window: OrderWindow, size_bytes: int) -> OrderWindow | None:
        """The window whose extents ahead are freed for this one: of the idle windows of its user, the one that has been
        idle longest. Where users have more ahead than there is room for, also of the idle windows of users who are beyond
        their part. None where there is none."""
        active = {*self._active_of(window.user)}
        others = [each for each in self._of(window.user) if each not in active]
        if self._crowded(size_bytes):
            sharing = self._sharing()
            for user in (user for user in self._users if user != window.user):
                mine, ahead = self._of(user), _ahead_bytes(self._of(user))
                if user not in sharing or ahead > self._room_bytes(user):
                    moving = set(self._moving(mine))
                    others += [each for each in mine if each not in moving]
        return min(
            (each for each in others if each.ahead.copies), key=lambda each: each.moved_at, default=None
        )

    def room_bytes(self, window: OrderWindow) -> int:
        """Bytes that one window may have ahead: its part, or one extent where there is room for that."""
        room = self._room_bytes(window.user)
        return max(room // len(self._active_of(window.user)), min(room, self._reserve.largest_bytes))

    def _of(self, user: int) -> Collection[OrderWindow]:
        return self._users[user].values()

    def _moving(self, windows: Collection[OrderWindow]) -> Collection[OrderWindow]:
        since = self._context.now - IDLE_S
        return [each for each in windows if each.moved_at > since]

    def _active_of(self, user: int) -> Collection[OrderWindow]:
        """A user's windows that share its room."""
        windows, reserve = self._of(user), self._reserve
        enough = len(windows) * reserve.largest_bytes <= self._room_bytes(user)
        if enough or reserve.oversubscribed_by(user) or not reserve.streams:
            return windows
        return self._moving(windows) or windows

    def _sharing(self) -> set[int]:
        """The users who share the room: all, or, where it is less than an extent for each, those that are not idle."""
        reserve = self._reserve
        users = {user for user in self._users if not reserve.oversubscribed_by(user)}
        if len(users) * reserve.largest_bytes <= reserve.ahead_bytes() or not reserve.streams:
            return users
        return {user for user in users if self._moving(self._of(user))} or users

    def _room_bytes(self, user: int) -> int:
        """A user's part of the room, or one extent where there is room for that."""
        every = self._reserve.ahead_bytes(user)
        return max(every // len(self._sharing() | {user}), min(every, self._reserve.largest_bytes))

    def _crowded(self, size_bytes: int) -> bool:
        """Return whether several users together have so much ahead that there is no room for `size_bytes` more."""
        if len(self._users) < 2:
            return False
        users = (user for user in self._users if not self._reserve.oversubscribed_by(user))
        ahead = sum(_ahead_bytes(self._of(user)) for user in users)
        return ahead + size_bytes > self._reserve.ahead_bytes()

    def _retune(self) -> None:
        self._reserve.set_reads(
            {
                user: (sum(each.open_bytes for each in mine), sum(each.absent_bytes for each in mine))
                for user, mine in ((user, self._of(user)) for user in self._users)
            }
        )


def _ahead_bytes(windows: Collection[OrderWindow]) -> int:
    return sum(each.ahead.size_bytes for each in windows)
