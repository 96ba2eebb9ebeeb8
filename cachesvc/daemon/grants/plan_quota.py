"""Rows of all plans that readers have with the daemon, shared out by user: a row takes 140 bytes of its memory."""

from __future__ import annotations

from collections import Counter

from cachesvc.core.model import ReaderId

ROWS = 12_000_000
"""1.7 GB. Eight ranks over a million extents each (64 TB) are one user's share."""


class Rows:
    """Who has how many, those of the epochs after included. A user has no more than twice what it leaves free (see
    `daemon/control/call_quota.py`): 8 million when alone, the next one 2.7. The daemon's own has what it wants, and
    takes none of these."""

    def __init__(self, own: int, most: int = ROWS) -> None:
        self._own, self._most = own, most
        self._of: dict[ReaderId, tuple[int, int]] = {}
        self._held: Counter[int] = Counter()

    def take(self, reader: ReaderId, user: int, rows: int) -> bool:
        """A reader's plan of so many, in place of its last one, which ends in any case; False: its user has its share."""
        self.leave(reader)
        free = self._most - self._held.total() - rows
        admitted = user == self._own or self._held[user] + rows <= 2 * free
        if admitted:
            self.adopt(reader, user, rows)
        return admitted

    def adopt(self, reader: ReaderId, user: int, rows: int) -> None:
        """A plan that another daemon took."""
        if user != self._own:
            self._of[reader] = user, rows
            self._held[user] += rows

    def leave(self, reader: ReaderId) -> None:
        """A reader's plan has ended, if it had one."""
        user, rows = self._of.pop(reader, (self._own, 0))
        self._held[user] -= rows
        if not self._held[user]:
            del self._held[user]
