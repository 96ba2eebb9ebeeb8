"""The place where the core meets IO: events in, commands out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from cachesvc.core import events
from cachesvc.core.commands import Command
from cachesvc.core.events import Event
from cachesvc.core.node.node import Node


class Timer(Protocol):
    """A part that has work to do from time to time."""

    def next_deadline(self) -> float:
        """The time of its next work, in seconds of the clock; inf without any."""
        ...

    def tick(self) -> None:
        """Do the work that is due."""
        ...


class Runner:
    """Has the commands of `Node.handle` executed, on the loop's thread. Calls for a lost tier are answered without it; the
    result of a call that ends later is ignored."""

    def __init__(self, node: Node, clock: Callable[[], float]) -> None:
        self.node = node
        self.execute: Mapping[type[Command], Callable[[Any], None]] = {}
        """What executes each kind of command."""
        self.timers: list[Timer] = []
        self.listeners: list[Callable[[Event], None]] = []
        """Called with each event when its commands are executed."""
        self._clock = clock

    def handle(self, event: Event) -> None:
        """Give an event to the core and execute its commands."""
        for command in self.node.handle(event, self._clock()):
            self.execute[type(command)](command)
        for listener in self.listeners:
            listener(event)

    def tick(self) -> None:
        """Run the work that is due; the loop calls this at `next_deadline`."""
        now = self._clock()
        for timer in self.timers:
            if timer.next_deadline() <= now:
                timer.tick()
        if self.node.next_deadline() <= now:
            self.handle(events.Tick())

    def next_deadline(self) -> float:
        """The time at which `tick` is due, in seconds of the clock; inf without a deadline."""
        return min([self.node.next_deadline(), *(timer.next_deadline() for timer in self.timers)])
