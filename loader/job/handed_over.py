"""The batches that a loader has handed over since its digest was last computed."""

from __future__ import annotations

from typing import Any, NamedTuple

from cachesvc.core.order.digests import SampleSum


class Span(NamedTuple):
    """The turns [first, last) of an epoch of a feed; or, of a batch with bad samples, the samples that it had instead."""

    feed: Any
    epoch: int
    first: int
    last: int
    instead: Any = None


class HandedOver:
    """Notes batches in constant time each. `before`: the sum over everything that all ranks handed over before; None where
    that is not known."""

    def __init__(self, before: SampleSum | None) -> None:
        self.before = before
        self.spans: list[Span] = []
        self.own = SampleSum()
        """The sum over the batches of this rank, those in `spans` apart."""

    @property
    def is_empty(self) -> bool:
        """True if no batch was handed over since `before`."""
        return not self.spans and self.own == SampleSum()

    def note(self, feed: Any, epoch: int, turn: int, instead: Any = None) -> None:
        """Note a batch; `instead`: the real samples of one that had bad ones."""
        if self.spans and instead is None:
            latest = self.spans[-1]
            if latest[:2] == (feed, epoch) and latest.last == turn and latest.instead is None:
                self.spans[-1] = latest._replace(last=turn + 1)
                return
        self.spans.append(Span(feed, epoch, turn, turn + 1, instead))
