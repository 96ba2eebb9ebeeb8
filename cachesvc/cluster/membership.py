"""The Protocol of membership; `open_membership` chooses the implementation by the `--cluster` option."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a member answers: HOST:PORT. `name` and `zone` are "" where the membership does not know them; the member
    itself tells them in its greeting."""

    address: str
    name: str = ""
    zone: str = ""


class Membership(Protocol):
    """A source of members. An error of the source (DNS is empty, etcd is gone) is no change: the last list holds."""

    def watch(self, changed: Callable[[frozenset[Endpoint]], None]) -> None:
        """Call `changed` with all members, this node included or not, first as soon as they are known and then whenever
        they change. Blocks until `close`; runs on a thread of its own."""
        ...

    def close(self) -> None:
        """End `watch`, and remove this node's own entry where there is one."""
        ...
