"""Shares of the window where orders are many: for those that move, unless all are idle or there is enough for all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from cachesvc.core.lookahead.order_windows import IDLE_S, OrderWindow, OrderWindows
from cachesvc.core.model import ExtentId
from cachesvc.core.records.event_context import EventContext

SIZE, USER = 10, 1001


@dataclass
class Room:
    """The size of a window, with the interface of `Reserve`."""

    extents: int
    oversubscribed: bool = False
    streams: bool = True
    largest_bytes: int = SIZE

    def ahead_bytes(self, user: int | None = None) -> int:
        return self.extents * SIZE

    def oversubscribed_by(self, user: int) -> bool:
        return self.oversubscribed


class Bench:
    """Orders that begin one second after another, each with an extent ahead."""

    def __init__(self, room: Room, orders: int) -> None:
        self.context = EventContext()
        self.windows = OrderWindows(room, self.context)  # type: ignore[arg-type]
        self.orders: list[OrderWindow] = []
        for number in range(orders):
            self.context.now = float(number)
            window = self.windows.join(number, [(ExtentId(bytes([number])), 0, 0)], USER)
            copy: Any = object()
            window.ahead.copies[copy], window.ahead.size_bytes = None, SIZE
            self.orders.append(window)

    def window_to_free(self) -> OrderWindow | None:
        """The window that is freed for the order that came last."""
        return self.windows.window_to_free(self.orders[-1], SIZE)


def test_where_all_orders_are_idle_all_fetch_ahead() -> None:
    bench = Bench(Room(2), 3)
    bench.context.now = 2 * IDLE_S
    assert bench.windows.active() == set(bench.orders)
    assert bench.window_to_free() is None
    assert bench.windows.room_bytes(bench.orders[-1]) == SIZE


@pytest.mark.parametrize("room", [Room(3), Room(2, oversubscribed=True), Room(2, streams=False)], ids=str)
def test_idle_orders_keep_their_part_where_others_do_not_need_it(room: Room) -> None:
    """The room holds an extent of each order, or the window is no limit."""
    bench = Bench(room, 3)
    bench.context.now = IDLE_S + 1.5
    assert bench.windows.active() == set(bench.orders)
    assert bench.window_to_free() is None
