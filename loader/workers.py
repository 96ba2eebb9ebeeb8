"""torch's own worker machinery under a feed: whole batches, asked for by two numbers each."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import Sampler

from cachesvc.core.errors import CacheError
from loader.feed import Turn
from loader.made import Ledger, Made, Maker, raise_failure

TELL_EVERY_S = 1.0
"""A worker has no plan of its own; this is how a restarted daemon hears what it still holds."""


class _Turns(Sampler[Turn]):
    """The keys of the turns to come; set anew before each epoch, so that workers may persist."""

    def __init__(self) -> None:
        self.epoch, self.first, self.last = 0, 0, 0

    def __iter__(self) -> Iterator[Turn]:
        return (Turn(self.epoch, turn) for turn in range(self.first, self.last))

    def __len__(self) -> int:
        return self.last - self.first


class _Made(TorchDataset[Any]):
    """Batches with their reports."""

    def __init__(self, maker: Maker) -> None:
        self.maker = maker
        self.dataset = maker.feed.dataset
        self._tell_at = 0.0

    def __getitem__(self, key: Turn) -> Made:
        made = self.maker.make(key)
        if (now := time.monotonic()) >= self._tell_at:
            self._tell_at = now + TELL_EVERY_S
            self.maker.feed.passed(key.turn)
        return made


def _as_is(batch: Any) -> Any:
    return batch


class Engine:
    """Fetches turns in order through a torch DataLoader with `settings` (its keyword arguments)."""

    def __init__(self, maker: Maker, ledger: Ledger, settings: dict[str, Any]) -> None:
        self._turns = _Turns()
        self._loader = torch.utils.data.DataLoader(
            _Made(maker), batch_size=None, sampler=self._turns, collate_fn=_as_is, **settings
        )
        self._batches: Iterator[Any] = iter(())
        self._next = Turn(0, 0)
        self._ledger = ledger

    def start(self, epoch: int, first: int, last: int) -> None:
        """Begin to fetch the turns [first, last) of an epoch."""
        self._turns.epoch, self._turns.first, self._turns.last = epoch, first, last
        self._next = Turn(epoch, first)
        self._batches = iter(self._loader)

    def fetch(self, key: tuple[int, int]) -> Made:
        """The batch of a turn; earlier ones that were prefetched and skipped are dropped. Raises the typed error
        that its worker met."""
        asked = time.perf_counter()
        while True:
            reached = self._next
            made: Made | None = next(self._batches, None)
            if made is None:
                raise CacheError(
                    f"the workers ended before batch {key[1]} of epoch {key[0]}; look at their log"
                )
            self._next = Turn(reached.epoch, reached.turn + 1)
            self._ledger.enter(made.report, asked)
            if reached == key:
                raise_failure(made.report)
                return made
            asked = time.perf_counter()
