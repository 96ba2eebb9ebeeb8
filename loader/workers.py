"""torch's own worker machinery under a feed: whole batches, asked for by three numbers each."""

from __future__ import annotations

import time
from collections.abc import Iterator
from signal import strsignal
from typing import Any, NamedTuple

import torch
from torch._C import _remove_worker_pids
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import Sampler, get_worker_info

from cachesvc.core.errors import CacheError, InvalidInput
from loader.feed import Turn
from loader.forks import CHILD_SAYS, abandon_in_children
from loader.handover import Arena, Handed, packed
from loader.made import Made, Maker
from loader.orphans import TiedFirst

TELL_EVERY_S = 1.0
"""A worker has no plan of its own; this is how a restarted daemon hears what it still holds."""
LOCK_S = 2.0
"""Nobody holds a queue's lock for so long, but one who will not give it back."""


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
    """A batch, handed over where it was built, and its report."""

    def __init__(self, maker: Maker) -> None:
        self.tied = TiedFirst()  # before all else: attributes are unpickled in this order
        self.maker = maker
        self.feed = maker.feed
        self.dataset = self.feed.dataset
        self.arena: Arena | None = None
        self._run = -1
        self._tell_at = 0.0

    def __getitem__(self, key: _Asked) -> Made:
        made = self._built(key)
        if (now := time.monotonic()) >= self._tell_at:
            self._tell_at = now + TELL_EVERY_S
            self.feed.passed(key.turn)
        return made

    def _built(self, key: _Asked) -> Made:
        info, turn = get_worker_info(), Turn(key.epoch, key.turn)
        if self.arena is None or info is None:
            return self.maker.make(turn)
        if key.run != self._run:
            self._run = key.run
            self.arena.take_back(info.id)
        slot = self.arena.free_slot(info.id)
        self.feed.empty = slot.empty if slot is not None else None
        made = self.maker.make(turn)
        if slot is None or made.report.failure is not None:
            return made
        tree = packed(made.batch, slot)
        return made._replace(batch=self.arena.send(slot, tree)) if slot.used else made


def _as_is(batch: Any) -> Any:
    return batch


class _Done:
    """The trainer's side of the event that ends its workers, without its lock: a worker that was killed while it looked
    at the event has left that taken for ever. torch terminates those that then do not hear."""

    def __init__(self, event: Any) -> None:
        self._event, self._set = event, False

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        self._event._flag.release()  # a semaphore; workers only ever look whether it is above zero


def _bear_deaths(batches: Any) -> None:
    """A worker's death is raised by `next`, which looks every 5 s. torch's SIGCHLD handler raises at once, wherever the
    trainer is: inside the `with` of a queue's Condition that leaves its lock taken, and ending the workers waits for it."""
    if getattr(batches, "_worker_pids_set", False):
        _remove_worker_pids(id(batches))
        batches._worker_pids_set = False
        batches._workers_done_event = _Done(batches._workers_done_event)


def _unlock(batches: Any) -> None:
    """Give back the locks of queues that Ctrl-C has left taken, in the midst of a `put`: ending the workers takes them."""
    for queue in getattr(batches, "_index_queues", []):
        queue._notempty.acquire(timeout=LOCK_S)
        queue._notempty.release()


def _killed(batches: Any) -> str:
    """Which workers a signal has ended, in torch's words."""
    ended = [worker for worker in getattr(batches, "_workers", []) if (worker.exitcode or 0) < 0]
    return ", ".join(f"pid {each.pid} is killed by signal: {strsignal(-each.exitcode)}" for each in ended)


_of_parents: list[object] = []
"""In a forked child: iterators of torch's over its parent's workers. Dropping one would end them."""


class Engine:
    """Fetches turns in order through a torch DataLoader with `settings` (its keyword arguments). A forked child
    leaves its parent's workers alone, and has its own from the next `start` on."""

    def __init__(self, maker: Maker, settings: dict[str, Any]) -> None:
        self._turns = _Turns()
        self._made_by = _Counted(maker)
        self._settings = settings
        self._loader: torch.utils.data.DataLoader[Any] | None = self._opened()
        self._batches: Iterator[Any] = iter(())
        self._arriving: Iterator[int] = iter(())
        """Their turns. Each iteration has its own: who still waits in an abandoned one moves nothing of the next."""

    def start(self, epoch: int, first: int, last: int) -> None:
        """Begin to fetch the turns [first, last) of an epoch."""
        self.rest()
        if self._loader is None:
            self._loader, self._made_by.arena = self._opened(), None
        loader, turns = self._loader, self._turns
        if loader.num_workers and (self._made_by.arena is None or not loader.persistent_workers):
            # New workers get new slots: nothing that is left of the old ones can write into these.
            self._made_by.arena = Arena(loader.num_workers, loader.prefetch_factor or 1)
        turns.run, turns.epoch, turns.first, turns.last = turns.run + 1, epoch, first, last
        self._arriving, self._batches = iter(range(first, last)), iter(loader)
        _bear_deaths(self._batches)

    def fetch(self, key: tuple[int, int]) -> Made:
        """The batch of a turn; earlier ones that were prefetched and skipped are dropped."""
        if self._loader is None:
            raise InvalidInput(CHILD_SAYS)
        arriving = self._arriving
        for turn in arriving:
            made = self._arrived() if arriving is self._arriving else None
            if made is None:
                break
            if isinstance(made.batch, Handed):
                made = made._replace(batch=made.batch.open())
            if turn == key[1]:
                return made
        raise CacheError(f"the workers ended before batch {key[1]} of epoch {key[0]}; look at their log")

    def _arrived(self) -> Made | None:
        try:
            return next(self._batches, None)
        except Exception as error:  # noqa: BLE001
            # Without torch's frames: they would keep the workers for as long as anybody keeps the error.
            said = error.with_traceback(None)
            if type(error) is RuntimeError and "exited unexpectedly" in str(error):
                if killed := _killed(self._batches):
                    said = RuntimeError(f"{error} ({killed})")
                self._loader, self._batches = None, iter(())  # the dead do not come back: `start` has others
            raise said from None
        except BaseException:
            _unlock(self._batches)
            raise

    def rest(self) -> None:
        """The iteration has ended, or was abandoned: workers end, unless they persist."""
        self._batches = iter(())

    def abandon(self) -> None:
        """In a forked child, also in a worker: see `_of_parents`."""
        _of_parents.extend((self._loader, self._batches))
        self._loader, self._batches = None, iter(())

    def _opened(self) -> torch.utils.data.DataLoader[Any]:
        abandon_in_children(self)
        return torch.utils.data.DataLoader(
            self._made_by, batch_size=None, sampler=self._turns, collate_fn=_as_is, **self._settings
        )
