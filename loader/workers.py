"""torch's own worker machinery under a feed: whole batches, asked for by three numbers each."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import Sampler, get_worker_info

from cachesvc.core.errors import CacheError
from loader.feed import Feed, Turn
from loader.handover import Arena, Handed, packed
from loader.reader import ORIGINS

TELL_EVERY_S = 1.0
"""A worker has no plan of its own; this is how a restarted daemon hears what it still holds."""


class _Asked(NamedTuple):
    """The key of a batch; `run` counts the iterations of the trainer."""

    run: int
    epoch: int
    turn: int


class _Turns(Sampler[_Asked]):
    """The keys of the turns to come; set anew before each epoch, so that workers may persist."""

    def __init__(self) -> None:
        self.run, self.epoch, self.first, self.last = 0, 0, 0, 0

    def __iter__(self) -> Iterator[_Asked]:
        return (_Asked(self.run, self.epoch, turn) for turn in range(self.first, self.last))

    def __len__(self) -> int:
        return self.last - self.first


class _Counted(TorchDataset[Any]):
    """A batch, handed over where it was built, and the bytes that this worker read for it by origin (in the order
    of `ORIGINS`)."""

    def __init__(self, feed: Feed) -> None:
        self.feed = feed
        self.dataset = feed.dataset
        self.arena: Arena | None = None
        self._run = -1
        self._tell_at = 0.0

    def __getitem__(self, key: _Asked) -> tuple[Any, list[int]]:
        before = self.feed.origin_bytes()
        batch = self._built(key)
        after = self.feed.origin_bytes()
        if (now := time.monotonic()) >= self._tell_at:
            self._tell_at = now + TELL_EVERY_S
            self.feed.passed(key.turn)
        return batch, [after.get(origin, 0) - before.get(origin, 0) for origin in ORIGINS]

    def _built(self, key: _Asked) -> Any:
        info, turn = get_worker_info(), Turn(key.epoch, key.turn)
        if self.arena is None or info is None:
            return self.feed[turn]
        if key.run != self._run:
            self._run = key.run
            self.arena.take_back(info.id)
        slot = self.arena.free_slot(info.id)
        self.feed.empty = slot.empty if slot is not None else None
        batch = self.feed[turn]
        if slot is None:
            return batch
        tree = packed(batch, slot)
        return self.arena.send(slot, tree) if slot.used else batch


def _as_is(batch: Any) -> Any:
    return batch


class Engine:
    """Fetches turns in order through a torch DataLoader with `settings` (its keyword arguments)."""

    def __init__(self, feed: Feed, settings: dict[str, Any]) -> None:
        self._turns = _Turns()
        self._made_by = _Counted(feed)
        self._loader = torch.utils.data.DataLoader(
            self._made_by, batch_size=None, sampler=self._turns, collate_fn=_as_is, **settings
        )
        self._batches: Iterator[Any] = iter(())
        self._next = Turn(0, 0)
        self.origin_bytes = dict.fromkeys(ORIGINS, 0)

    def start(self, epoch: int, first: int, last: int) -> None:
        """Begin to fetch the turns [first, last) of an epoch."""
        self.rest()
        loader, turns = self._loader, self._turns
        if loader.num_workers and (self._made_by.arena is None or not loader.persistent_workers):
            # New workers get new slots: nothing that is left of the old ones can write into these.
            self._made_by.arena = Arena(loader.num_workers, loader.prefetch_factor or 1)
        turns.run, turns.epoch, turns.first, turns.last = turns.run + 1, epoch, first, last
        self._next = Turn(epoch, first)
        self._batches = iter(loader)

    def fetch(self, key: tuple[int, int]) -> Any:
        """The batch of a turn; earlier ones that were prefetched and skipped are dropped."""
        while True:
            reached = self._next
            batch, read = next(self._batches, (None, None))
            if read is None:
                raise CacheError(
                    f"the workers ended before batch {key[1]} of epoch {key[0]}; look at their log"
                )
            self._next = Turn(reached.epoch, reached.turn + 1)
            for origin, count in zip(ORIGINS, read, strict=True):
                self.origin_bytes[origin] += int(count)
            if isinstance(batch, Handed):
                batch = batch.open()
            if reached == key:
                return batch

    def rest(self) -> None:
        """The iteration has ended, or was abandoned: workers end, unless they persist."""
        self._batches = iter(())
