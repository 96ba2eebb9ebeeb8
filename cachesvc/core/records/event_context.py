"""The event that a node is handling: its time, and the commands that follow from it."""

from __future__ import annotations

import math

from cachesvc.core.commands import Command


class EventContext:
    """The context of the current event. A node has one, which its parts share."""

    __slots__ = ("began", "changed", "commands", "now")

    def __init__(self) -> None:
        self.began = math.inf
        """When the node's first event came, in seconds."""
        self.now = 0.0
        self.commands: list[Command] = []
        self.changed = False
        """Something that may let a fill start has changed since fills were last started."""

    def begin(self, now: float, changes: bool) -> None:
        """Begin an event. `changes`: events of its kind always change what fills may start."""
        self.changed |= changes
        self.now = now
        if self.began > now:
            self.began = now
        self.commands = []

    def emit(self, command: Command) -> None:
        """Add a command that follows from the event."""
        self.commands.append(command)

    def mark_changed(self) -> None:
        """Have fills started once the event is handled."""
        self.changed = True

    def clear_changed(self) -> None:
        """Note that fills are being started now; later changes are for the next event."""
        self.changed = False
