"""torch's own worker machinery under a feed: whole batches, asked for by three numbers each."""

from __future__ import annotations

import os
import select
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from signal import strsignal
from typing import Any, NamedTuple

import torch
from torch._C import _remove_worker_pids
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import Sampler, get_worker_info
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from cachesvc.core.errors import CacheError, InvalidInput
from cachesvc.core.order.permute import mix
from loader.batches.feed import Turn
from loader.batches.maker import Made, Maker
from loader.process.fork_hooks import CHILD_SAYS, abandon_in_children, forks_workers
from loader.process.parent_watch import EndsWithTrainerOnUnpickle
from loader.workers.index_pipe import asking
from loader.workers.iteration import of_the_data
from loader.workers.shared_batches import Arena, Handed, packed

TELL_EVERY_S = 1.0
"""A worker has no plan of its own; this is how a restarted daemon hears what it still holds."""
LOOK_S = 5.0
"""How often a batch that is waited for looks whether the pinning thread lives, as torch does."""
REAP_S = 2.0
"""For the kernel to tell how a worker that is gone has ended."""


class _Asked(NamedTuple):
    """The key of a batch; `run` counts the iterations of the trainer."""

    run: int
    epoch: int
    turn: int


class _Line:
    """The keys of one iteration's turns, as torch asks for them: in order, and past those that were skipped."""

    def __init__(self, run: int, epoch: int, first: int, last: int) -> None:
        self._run, self._epoch, self._next, self._last = run, epoch, first, last
        self._asked: deque[int] = deque()

    def __iter__(self) -> Iterator[_Asked]:
        return self

    def __next__(self) -> _Asked:
        if self._next >= self._last:
            raise StopIteration
        self._asked.append(self._next)
        self._next += 1
        return _Asked(self._run, self._epoch, self._asked[-1])

    def skip_to(self, turn: int) -> None:
        """No turn before this one is asked for any more; those that were asked for still come."""
        self._next = max(self._next, turn)

    def come(self) -> int:
        """The turn whose batch has come, or what making it raised: workers answer in the order of asking."""
        return self._asked.popleft()


class _Turns(Sampler[_Asked]):
    """The keys of the turns to come; set anew before each iteration, so that workers may persist."""

    def __init__(self) -> None:
        self.line = _Line(0, 0, 0, 0)

    def __iter__(self) -> Iterator[_Asked]:
        return self.line


class _Counted(TorchDataset[Any]):
    """A batch, handed over where it was built, and its report."""

    def __init__(self, maker: Maker) -> None:
        self.tied = EndsWithTrainerOnUnpickle()  # before all else: attributes are unpickled in this order
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


def _polled(workers: list[Any], *others: int) -> select.poll:
    found = select.poll()
    for fd in (*(worker.sentinel for worker in workers), *others):
        found.register(fd, select.POLLIN)
    return found


def _read(polled: select.poll, fd: int, size: int) -> bytes:
    """os.read of a pipe that workers write to; the rest of a message whose writer died never comes, nor an end."""
    if any(ready != fd for ready, _ in polled.poll()):
        raise EOFError("a worker died")
    return os.read(fd, size)


class _Batches(_MultiProcessingDataLoaderIter):
    """torch's iterator; it hears at once of a worker that died, and ends workers without locks."""

    def __next__(self) -> Any:
        """torch's marks each batch for its profiler, whether one runs or not: a tenth of what a small batch takes."""
        profiled: bool = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
        return super().__next__() if profiled else self._next_data()  # type: ignore[no-untyped-call]

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        if first_iter:
            self._bear_deaths()
        super()._reset(loader, first_iter)

    def _bear_deaths(self) -> None:
        """torch's SIGCHLD handler raises wherever the trainer is, in a `put` too; what waits for batches looks instead."""
        _remove_worker_pids(id(self))
        self._worker_pids_set = False
        self._workers_done_event: Any = _Done(self._workers_done_event)
        results: Any = self._worker_result_queue
        reader = results._reader
        self._told_by = reader.fileno()
        self._heard = _polled(self._workers, *(() if self._pin_memory else (self._told_by,)))
        read = partial(_read, _polled(self._workers, self._told_by))
        reader._recv = partial(type(reader)._recv, weakref.proxy(reader), read=read)

    def _try_get_data(self, timeout: float = LOOK_S) -> tuple[bool, Any]:
        """torch's looks for the dead only when all of `timeout=` has passed."""
        deadline = time.monotonic() + timeout
        while True:
            asks: Any
            for asks in self._index_queues:
                asks.send()
            wait = max(0.0, min(LOOK_S, deadline - time.monotonic()))
            come = self._listen(0 if self._pin_memory else wait)
            try:
                if come:
                    return True, self._worker_result_queue.get()
                found: tuple[bool, Any] = super()._try_get_data(wait) if self._pin_memory else (False, None)  # type: ignore[no-untyped-call]
            except Exception:
                self._listen(0)
                raise
            if found[0] or time.monotonic() >= deadline:
                return found

    def _listen(self, wait_s: float) -> bool:
        """Wait for a worker's death, which is a RuntimeError, or for a batch; of those the pinning thread tells itself."""
        heard = self._heard.poll(wait_s * 1000)
        if not heard or (len(heard) == 1 and heard[0][0] == self._told_by):
            return bool(heard)
        ended = {fd for fd, _ in heard}
        raise RuntimeError(_exited([worker for worker in self._workers if worker.sentinel in ended]))


class _Loader(torch.utils.data.DataLoader[Any]):
    def _get_iterator(self) -> Any:
        if not self.num_workers:
            return super()._get_iterator()
        self.check_worker_number_rationality()
        given, self.multiprocessing_context = (
            self.multiprocessing_context,
            asking(self.multiprocessing_context),
        )
        try:
            with forks_workers():
                return _Batches(self)
        finally:
            self.multiprocessing_context = given


def _exited(dead: list[Any]) -> str:
    """In torch's words."""
    for worker in dead:
        worker.join(REAP_S)
    pids = ", ".join(str(worker.pid) for worker in dead)
    killed = ", ".join(
        f"pid {worker.pid} is killed by signal: {strsignal(-worker.exitcode)}"
        for worker in dead
        if (worker.exitcode or 0) < 0
    )
    return f"DataLoader worker (pid(s) {pids}) exited unexpectedly" + (f" ({killed})" if killed else "")


_of_parents: list[object] = []
"""In a forked child: iterators of torch's over its parent's workers. Dropping one would end them."""


class Engine:
    """Fetches turns in order through a torch DataLoader with `settings` (its keyword arguments). A forked child
    leaves its parent's workers alone, and has its own from the next `start` on. Without a `generator` in `settings`,
    workers' own generators are seeded by the seed, the rank's part, and the epoch and turn at which they begin."""

    def __init__(self, maker: Maker, settings: dict[str, Any]) -> None:
        self._turns = _Turns()
        self._made_by = _Counted(maker)
        # Without one, torch would draw its workers' seeds from the global generator.
        self._seeds = None if settings.get("generator") is not None else torch.Generator()
        self._settings = settings if self._seeds is None else {**settings, "generator": self._seeds}
        self._made_here = not settings["num_workers"]
        self._loader: torch.utils.data.DataLoader[Any] | None = self._opened()
        self._batches: Iterator[Any] = iter(())
        self._run = 0
        self._line = self._turns.line
        """Each iteration has its own: who still waits in an abandoned one moves nothing of the next."""

    def start(self, epoch: int, first: int, last: int) -> None:
        """Begin to fetch the turns [first, last) of an epoch."""
        self.rest()
        if self._loader is None:
            self._loader, self._made_by.arena = self._opened(), None
        loader = self._loader
        if loader.num_workers and (self._made_by.arena is None or not loader.persistent_workers):
            # New workers get new slots: nothing that is left of the old ones can write into these.
            self._made_by.arena = Arena(loader.num_workers, loader.prefetch_factor or 1)
        if self._seeds is not None:
            self._seeds.manual_seed(self._seed_of(epoch, first))
        self._run += 1
        self._line = self._turns.line = _Line(self._run, epoch, first, last)
        self._batches = self._of_torch(lambda: iter(loader))

    def fetch(self, key: tuple[int, int]) -> Made:
        """The batch of a turn; earlier ones are not asked for any more, and those that were prefetched are dropped."""
        if self._loader is None:
            raise InvalidInput(CHILD_SAYS)
        line = self._line
        line.skip_to(key[1])
        while line is self._line:
            try:
                made = self._arrived()
            except Exception as error:
                if of_the_data(error, self._made_here) and line.come() < key[1]:
                    continue
                raise
            if made is None:
                break
            if isinstance(made.batch, Handed):
                made = made._replace(batch=made.batch.open())
            if line.come() == key[1]:
                return made
        raise CacheError(f"the workers ended before batch {key[1]} of epoch {key[0]}; look at their log")

    def _seed_of(self, epoch: int, first: int) -> int:
        feed = self._made_by.feed
        return mix(feed.spec.seed, feed.share.low, epoch, first)

    def _arrived(self) -> Made | None:
        made: Made | None = self._of_torch(lambda: next(self._batches, None))
        return made

    def _of_torch(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except BaseException as error:  # noqa: BLE001
            if not (isinstance(error, Exception) and of_the_data(error, self._made_here)):
                # The dead do not come back, and of who was interrupted nobody knows what is on its way: `start` has others.
                self._loader, self._batches = None, iter(())
            # Without torch's frames: they would keep the workers for as long as anybody keeps the error.
            error.__context__ = None
            raise error.with_traceback(None) from None

    def rest(self) -> None:
        """The iteration has ended, or was abandoned: workers end, unless they persist."""
        self._batches = iter(())

    def abandon(self) -> None:
        """In a forked child, also in a worker: see `_of_parents`."""
        _of_parents.extend((self._loader, self._batches))
        self._loader, self._batches = None, iter(())

    def _opened(self) -> torch.utils.data.DataLoader[Any]:
        abandon_in_children(self)
        return _Loader(
            self._made_by, batch_size=None, sampler=self._turns, collate_fn=_as_is, **self._settings
        )
