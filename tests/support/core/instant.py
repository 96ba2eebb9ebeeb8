"""A node whose fills and evictions are done at once."""

from __future__ import annotations

from collections import deque

from cachesvc.core.commands import Command, Evict, StartFill
from cachesvc.core.events import Committed, Event, Evicted, Filled
from cachesvc.core.model import RAM
from cachesvc.core.node.node import Node
from tests.support.core.invariants import check

CHECK_EVERY = 20
"""Events between two checks of all invariants; a check visits all extents."""


def carry_out(node: Node, *events: Event, now: float = 0.0) -> list[Command]:
    """Send events, and then all that their commands lead to, in order; return all commands."""
    todo, commands, handled = deque(events), list[Command](), 0
    while todo:
        for command in node.handle(todo.popleft(), now):
            commands.append(command)
            if isinstance(command, StartFill):
                todo.append(Filled(command.extent, command.tier))
                if command.tier != RAM:
                    todo.append(Committed(command.extent, command.tier))
            elif isinstance(command, Evict):
                todo.append(Evicted(command.extent, command.tier))
        handled += 1
        if handled % CHECK_EVERY == 0:
            check(node)
    return commands
