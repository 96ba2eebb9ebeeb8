"""Detects that two ranks that should take the same batches have drifted apart.

A rank knows its own count of batches and hears of another rank's count late. The other's count is newer than the
previous comparison. So a rank counts as ahead only by its own count at that comparison; otherwise a delay would look
like a lead.
"""

from __future__ import annotations


class Drift:
    """Compares a rank's count with another's. They have drifted apart where more than `allowed` batches are between
    them."""

    def __init__(self, allowed: int) -> None:
        self._allowed = allowed
        self.forget()

    def forget(self) -> None:
        """Start comparing anew: one of the counts is unknown, or has restarted."""
        self._before: int | None = None
        self._side, self._since = 0, 0.0

    def compare(self, own: int, other: int, now: float) -> float | None:
        """Return for how many seconds this rank has certainly been ahead or behind; None while it is neither. `other` is
        the other rank's count at some time since the previous comparison."""
        ahead = self._before is not None and min(own, self._before) - other > self._allowed
        behind = other - own > self._allowed
        self._before, side = own, ahead - behind
        if side != self._side:
            self._side, self._since = side, now
        return now - self._since if side else None
