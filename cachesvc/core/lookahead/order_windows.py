"""What the plans of one order share of the window, and whose turn it is to fetch ahead in it.

The room is shared out by user, and a user's part by order: however many plans one user has, another's part is the same.
Who reads more side by side than the window holds has none (`core/tiering/stream_window.py`). Where orders are too many
for an extent each, those whose plans have passed nothing for a while (suspended, at a validation) count no more: what
they have ahead gives way to the others, and they fetch nothing before they move again. So do users."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from cachesvc.core.lookahead.plan_state import PlanState
from cachesvc.core.model import ExtentId
from cachesvc.core.records.event_context import EventContext
from cachesvc.core.records.order_window import OrderWindow
from cachesvc.core.tiering.stream_window import Reserve

FIRST_ENTRIES = 64
"""Entries by which an order is known: those of its first step, and not more of them than this."""
REST_S = 30.0
"""An order that has passed nothing for so long rests. One that is only slow waits for one fill in that time."""


class OrderWindows:
    """OrderWindows by their user and the extents that an order begins with, while it has plans."""

    def __init__(self, reserve: Reserve, context: EventContext) -> None:
        self._reserve = reserve
        self._context = context
        self._users: dict[int, dict[frozenset[ExtentId], OrderWindow]] = {}
        self._turn = 0
        self._turns: dict[int, int] = {}

    def join(self, number: int, entries: Sequence[tuple[ExtentId, int, int]], user: int) -> OrderWindow:
        """The window of a plan that begins."""
        rows = entries[:FIRST_ENTRIES]
        first = frozenset(extent for extent, step, _ in rows if step == entries[0][1])
        window = self._users.setdefault(user, {}).setdefault(first, OrderWindow(user))
        window.plans.add(number)
        window.moved_at = self._context.now
        return window

    def leave(self, plan: PlanState) -> None:
        """A plan has ended."""
        user = plan.window.user
        plan.window.plans.discard(plan.number)
        left = {first: each for first, each in self._users.pop(user).items() if each.plans}
        if left:
            self._users[user] = left
        else:
            self._turns.pop(user, None)
        self._retune()

    def measured(self, window: OrderWindow, open_bytes: int, absent_bytes: int) -> None:
        """A plan reads so much side by side, of which so much is not kept."""
        window.open_bytes = max(window.open_bytes, open_bytes)
        window.absent_bytes = max(window.absent_bytes, absent_bytes)
        self._retune()

    def fetched(self, window: OrderWindow) -> None:
        """A window had its turn."""
        self._turn = window.turn = self._turns[window.user] = self._turn + 1

    def turn_of(self, user: int) -> int:
        """When a user last fetched ahead: the one that waited longest is first."""
        return self._turns.get(user, 0)

    def has_room(self, window: OrderWindow, size_bytes: int) -> bool:
        """Whether so much more may be ahead in a window: within its part, or, where orders are too many for parts of an
        extent, the only extent in it. What those have that take no part must have gone before. The same of users."""
        mine, taking = self._of(window.user), self._taking(window.user)
        room, ahead = self._room_bytes(window.user), window.ahead_bytes
        if self._crowded(size_bytes):
            return False
        in_part = ahead + size_bytes <= room // len(taking)
        if in_part and len(taking) == len(mine):
            return True
        left = room - sum(each.ahead_bytes for each in mine)
        return size_bytes <= left and (in_part or not ahead)

    def taking(self) -> set[OrderWindow]:
        """Those that share the room: all, or, where that is less than an extent for each, all that move. Those of a user
        who has no room keep what there is room for."""
        sharing = self._sharing()
        return {
            each
            for user in self._users
            if user in sharing or self._reserve.tight_for(user)
            for each in self._taking(user)
        }

    def gives_way(self, window: OrderWindow, size_bytes: int) -> OrderWindow | None:
        """Of those with something ahead that take no part, the one that moved last longest ago: of those of its user and,
        where users have more ahead than there is room for, of those at rest whose user has no part or is beyond it."""
        taking = {*self._taking(window.user)}
        others = [each for each in self._of(window.user) if each not in taking]
        if self._crowded(size_bytes):
            sharing = self._sharing()
            for user in (user for user in self._users if user != window.user):
                mine, ahead = self._of(user), sum(each.ahead_bytes for each in self._of(user))
                if user not in sharing or ahead > self._room_bytes(user):
                    moving = set(self._moving(mine))
                    others += [each for each in mine if each not in moving]
        return min((each for each in others if each.ahead), key=lambda each: each.moved_at, default=None)

    def room_bytes(self, window: OrderWindow) -> int:
        """How much one window may have ahead: its part, or an extent where there is room for that."""
        room = self._room_bytes(window.user)
        return max(room // len(self._taking(window.user)), min(room, self._reserve.largest_bytes))

    def _of(self, user: int) -> Collection[OrderWindow]:
        return self._users[user].values()

    def _moving(self, windows: Collection[OrderWindow]) -> Collection[OrderWindow]:
        since = self._context.now - REST_S
        return [each for each in windows if each.moved_at > since]

    def _taking(self, user: int) -> Collection[OrderWindow]:
        """A user's orders that share its room."""
        windows, reserve = self._of(user), self._reserve
        enough = len(windows) * reserve.largest_bytes <= self._room_bytes(user)
        if enough or reserve.tight_for(user) or not reserve.streams:
            return windows
        return self._moving(windows) or windows

    def _sharing(self) -> set[int]:
        """The users who share the room: as orders do."""
        reserve = self._reserve
        users = {user for user in self._users if not reserve.tight_for(user)}
        if len(users) * reserve.largest_bytes <= reserve.ahead_bytes() or not reserve.streams:
            return users
        return {user for user in users if self._moving(self._of(user))} or users

    def _room_bytes(self, user: int) -> int:
        """A user's part, or an extent where there is room for that."""
        every = self._reserve.ahead_bytes(user)
        return max(every // len(self._sharing() | {user}), min(every, self._reserve.largest_bytes))

    def _crowded(self, size_bytes: int) -> bool:
        """Whether several users together have so much ahead, beyond their parts, that there is no room for as much more."""
        if len(self._users) < 2:
            return False
        users = (user for user in self._users if not self._reserve.tight_for(user))
        ahead = sum(each.ahead_bytes for user in users for each in self._of(user))
        return ahead + size_bytes > self._reserve.ahead_bytes()

    def _retune(self) -> None:
        self._reserve.reads(
            {
                user: (sum(each.open_bytes for each in mine), sum(each.absent_bytes for each in mine))
                for user, mine in ((user, self._of(user)) for user in self._users)
            }
        )
