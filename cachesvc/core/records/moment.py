"""The event that a node is handling: when it came, and what comes of it."""

from __future__ import annotations

import math

from cachesvc.core.events import Command


class Moment:
    """One a node, and its parts share it."""

    __slots__ = ("began", "changed", "commands", "now")

    def __init__(self) -> None:
        self.began = math.inf
        """When the node's first event came, in seconds."""
        self.now = 0.0
        self.commands: list[Command] = []
        self.changed = False
        """Something changed, in this event or since fills were last fed, that may let a fill start."""

    def begin(self, now: float, changes: bool) -> None:
        """Another event came, of a kind that changes what fills may start, or of one that only may."""
        self.changed |= changes
        self.now = now
        if self.began > now:
            self.began = now
        self.commands = []

    def tell(self, command: Command) -> None:
        """A command follows from the event."""
        self.commands.append(command)

    def change(self) -> None:
        """Fills are to be fed when the event is handled."""
        self.changed = True

    def fed(self) -> None:
        """They are being fed now; what changes from here on is for the next event."""
        self.changed = False
