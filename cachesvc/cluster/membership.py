"""The Protocol of membership; `open_membership` in `cluster/open.py` chooses the implementation by `--cluster`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from cachesvc.core.placement.roster import Endpoint


@dataclass(frozen=True, slots=True)
class Registration:
    """This node's own entry, where members do so: its name, the address at which peers reach it, and its zone."""

    name: str
    address: str
    zone: str = ""


Changed = Callable[[frozenset[Endpoint]], None]


class Membership(Protocol):
    """A source of members. An error of the source (DNS is empty, etcd is gone) is no change: the last list holds."""

    def watch(self, changed: Changed) -> None:
        """Call `changed` with all members, this node included or not, first as soon as they are known and then whenever
        they change. Blocks until `close`; runs once, on a thread of its own. An error that `changed` raises ends it."""
        ...

    @property
    def trouble(self) -> str:
        """Why the list cannot be read now; "" while it can, and before the first try."""
        ...

    def close(self) -> None:
        """End `watch` within 2 s, from any thread, without waiting for it. Before `watch` returns it removes this node's
        own entry where there is one."""
        ...
