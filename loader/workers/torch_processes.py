"""Runs torch's worker processes under a feed: workers make whole batches, each requested by three numbers."""

from __future__ import annotations

import multiprocessing
import os
import select
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.context import ForkProcess
from signal import strsignal
from typing import Any, NamedTuple

import torch
from torch._C import _remove_worker_pids
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import Sampler, get_worker_info
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from cachesvc.core.errors import CacheError, InvalidInput
from cachesvc.core.order.permute import mix
from cachesvc.system.fork_hooks import abandon_in_children, forks_workers
from cachesvc.system.group_signals import held_back
from loader.batches.maker import BatchMaker, MadeBatch
from loader.batches.turns import BatchKey
from loader.process.parent_watch import EndsWithTrainerOnUnpickle
from loader.process.pickled import sendable_errors
from loader.workers.index_pipe import index_pipe_context
from loader.workers.iteration import CHILD_SAYS, is_batch_error
from loader.workers.shared_batches import Arena
from loader.workers.silence import SILENT_S, Silence
from loader.workers.unsendable import opened, unsendable

PASSED_EVERY_S = 1.0
"""Interval at which a worker reports its position. A worker has no plan of its own; a restarted daemon learns from
the report what the worker still holds."""
CHECK_S = 5.0
"""Interval of the check that the pinning thread is alive while a batch is waited for, as in torch."""
REAP_S = 2.0
"""How long to wait for the exit status of a dead worker."""


class _Request(NamedTuple):
    """The key of a batch. `run` counts the iterations of the trainer."""

    run: int
    epoch: int
    turn: int


class _RequestQueue:
    """The keys of one iteration's turns in the order in which torch requests them, without skipped ones."""

    def __init__(self, run: int, epoch: int, first: int, last: int) -> None:
        self._run, self._epoch, self._next, self._last = run, epoch, first, last
        self._requested: deque[int] = deque()

    def __iter__(self) -> Iterator[_Request]:
        return self

    def __next__(self) -> _Request:
        if self._next >= self._last:
            raise StopIteration
        self._requested.append(self._next)
        self._next += 1
        return _Request(self._run, self._epoch, self._requested[-1])

    def skip_to(self, turn: int) -> None:
        """Request no turn before this one any more. Turns already requested still arrive."""
        self._next = max(self._next, turn)

    def next_arrived(self) -> int:
        """Return the turn of the batch or error that has just arrived: workers answer in the order of requests."""
        return self._requested.popleft()


class _RequestSampler(Sampler[_Request]):
    """The sampler that yields keys. Its queue is replaced before each iteration, so that workers may persist."""

    def __init__(self) -> None:
        self.requests = _RequestQueue(0, 0, 0, 0)

    def __iter__(self) -> Iterator[_Request]:
        return self.requests


class _BatchDataset(TorchDataset[Any]):
    """The dataset of the torch loader: an item is a whole batch in shared memory, with its report."""

    def __init__(self, maker: BatchMaker) -> None:
        self.tied = EndsWithTrainerOnUnpickle()  # first, because attributes are unpickled in this order
        self.maker = maker
        self.feed = maker.feed
        self.dataset = self.feed.dataset
        self.arena: Arena | None = None
        self._run = -1
        self._passed_at = 0.0

    def __getitem__(self, key: _Request) -> MadeBatch:
        with sendable_errors():
            made = self._make(key)
        if (now := time.monotonic()) >= self._passed_at:
            self._passed_at = now + PASSED_EVERY_S
            self.feed.passed(key.turn)
        return made

    def _make(self, key: _Request) -> MadeBatch:
        info, turn = get_worker_info(), BatchKey(key.epoch, key.turn)
        if self.arena is None or info is None:
            return self.maker.make(turn)
        if key.run != self._run:
            self._run = key.run
            self.arena.take_back(info.id)
        slot = self.arena.free_slot(info.id)
        self.feed.empty = slot.empty if slot is not None else None
        made = self.maker.make(turn)
        if made.report.failure is not None:
            return made
        try:
            return made._replace(batch=self.arena.send(made.batch, slot))
        except Exception as error:  # noqa: BLE001  values of any class pickle themselves
            return unsendable(made, self.feed, turn, error)


def _as_is(batch: Any) -> Any:
    return batch


class _DoneEvent:
    """The trainer's side of the event that ends its workers, without the event's lock: a worker that was killed
    while it read the event has left the lock taken. torch terminates workers that do not see the event."""

    def __init__(self, event: Any) -> None:
        self._event, self._set = event, False

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        self._event._flag.release()  # a semaphore; workers only check whether it is above zero


def _poll_of(workers: list[Any], *others: int) -> select.poll:
    found = select.poll()
    for fd in (*(worker.sentinel for worker in workers), *others):
        found.register(fd, select.POLLIN)
    return found


def _read(polled: select.poll, fd: int, size: int) -> bytes:
    """Read from the workers' result pipe. Raises EOFError if a worker dies: the rest of its message would never
    come, and the pipe would not end."""
    if any(ready != fd for ready, _ in polled.poll()):
        raise EOFError("a worker died")
    return os.read(fd, size)


class _WorkerIterator(_MultiProcessingDataLoaderIter):
    """torch's iterator, which here notices the death of a worker at once and ends workers without locks."""

    def __next__(self) -> Any:
        """Return the next batch. torch marks each batch for its profiler even when none runs, which takes a tenth
        of a small batch's time."""
        profiled: bool = torch.autograd._profiler_enabled()
        return super().__next__() if profiled else self._next_data()  # type: ignore[no-untyped-call]

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        if first_iter:
            self._silence = loader.silence
            self._watch_workers()
        super()._reset(loader, first_iter)

    def _watch_workers(self) -> None:
        """Watch for dead workers while waiting for batches. torch's SIGCHLD handler, removed here, raises anywhere
        in the trainer, even within a `put`."""
        _remove_worker_pids(id(self))
        self._worker_pids_set = False
        self._workers_done_event: Any = _DoneEvent(self._workers_done_event)
        results: Any = self._worker_result_queue
        reader = results._reader
        self._results_fd = reader.fileno()
        self._wakeups = _poll_of(self._workers, *(() if self._pin_memory else (self._results_fd,)))
        read = partial(_read, _poll_of(self._workers, self._results_fd))
        reader._recv = partial(type(reader)._recv, weakref.proxy(reader), read=read)

    def _try_get_data(self, timeout: float = CHECK_S) -> tuple[bool, Any]:
        """Wait for a result, checking for dead workers all the time. torch checks only after the whole timeout."""
        deadline = time.monotonic() + timeout
        while True:
            pipe: Any
            for pipe in self._index_queues:
                pipe.send()
            now = time.monotonic()
            wait = max(0.0, min(CHECK_S, self._silence.limit_s, deadline - now))
            if self._silence.is_long(now):
                self._silence.warn(self._owing(), isinstance(self._workers[0], ForkProcess))
            ready = self._wait_for_result(0 if self._pin_memory else wait)
            try:
                if ready:
                    self._silence.heard()
                    return True, self._worker_result_queue.get()
                found: tuple[bool, Any] = super()._try_get_data(wait) if self._pin_memory else (False, None)  # type: ignore[no-untyped-call]
            except Exception:
                self._wait_for_result(0)
                raise
            if found[0]:
                self._silence.heard()
            if found[0] or time.monotonic() >= deadline:
                return found

    def _owing(self) -> list[int | None]:
        """Return the pids of the workers that have a request and have not answered it."""
        owing = {found[0] for found in self._task_info.values() if len(found) == 1}
        return [worker.pid for number, worker in enumerate(self._workers) if number in owing]

    def _wait_for_result(self, wait_s: float) -> bool:
        """Wait for a worker's death, which raises RuntimeError, or for a result in the pipe. With pinned memory
        results come from the pinning thread instead."""
        events = self._wakeups.poll(wait_s * 1000)
        if not events or (len(events) == 1 and events[0][0] == self._results_fd):
            return bool(events)
        ended = {fd for fd, _ in events}
        raise RuntimeError(_exit_message([worker for worker in self._workers if worker.sentinel in ended]))


class _Loader(torch.utils.data.DataLoader[Any]):
    def __init__(self, *args: Any, silence: Silence, **given: Any) -> None:
        self.silence = silence
        super().__init__(*args, **given)

    def _get_iterator(self) -> Any:
        if not self.num_workers:
            return super()._get_iterator()
        self.check_worker_number_rationality()
        original = self.multiprocessing_context
        self.multiprocessing_context = index_pipe_context(original)
        try:
            with held_back(but_ctrl_c=not _forks(original)), forks_workers():
                return _WorkerIterator(self)
        finally:
            self.multiprocessing_context = original


def _forks(context: Any) -> bool:
    """Return whether workers of this multiprocessing context, None for the default one, are forked."""
    return bool((context or multiprocessing).get_start_method() == "fork")


def _exit_message(dead: list[Any]) -> str:
    """Describe dead workers in torch's words."""
    for worker in dead:
        worker.join(REAP_S)
    pids = ", ".join(str(worker.pid) for worker in dead)
    killed = ", ".join(
        f"pid {worker.pid} is killed by signal: {strsignal(-worker.exitcode)}"
        for worker in dead
        if (worker.exitcode or 0) < 0
    )
    return f"DataLoader worker (pid(s) {pids}) exited unexpectedly" + (f" ({killed})" if killed else "")


_parent_iterators: list[object] = []
"""A forked child keeps its parent's torch iterators here: dropping one would end the parent's workers."""


class ProcessEngine:
    """Makes turns in order with a torch DataLoader; `settings` are its keyword arguments.

    A forked child leaves its parent's workers alone and gets its own at the next `start`. Without a `generator` in
    `settings`, the workers' own generators are seeded by the seed, the rank's share, and the epoch and turn at
    which they begin.
    """

    def __init__(self, maker: BatchMaker, settings: dict[str, Any], silent_s: float = SILENT_S) -> None:
        """`silent_s`: seconds after which workers that send nothing are named, once."""
        self._silence = Silence(silent_s)
        self._sampler = _RequestSampler()
        self._dataset = _BatchDataset(maker)
        # Without a generator torch would draw its workers' seeds from the global one.
        self._seeds = None if settings.get("generator") is not None else torch.Generator()
        self._settings = settings if self._seeds is None else {**settings, "generator": self._seeds}
        self._in_process = not settings["num_workers"]
        self._loader: torch.utils.data.DataLoader[Any] | None = self._new_loader()
        self._batches: Iterator[Any] = iter(())
        self._run = 0
        self._requests = self._sampler.requests
        """One per iteration, so that a caller still waiting in an abandoned one does not advance the next."""

    def start(self, epoch: int, first: int, last: int) -> None:
        """Begin to make the turns [first, last) of an epoch."""
        self.stop()
        if self._loader is None:
            self._loader, self._dataset.arena = self._new_loader(), None
        loader = self._loader
        if loader.num_workers and (self._dataset.arena is None or not loader.persistent_workers):
            # New workers get new slots, into which no old worker can write.
            self._dataset.arena = Arena(loader.num_workers, loader.prefetch_factor or 1)
        if self._seeds is not None:
            self._seeds.manual_seed(self._seed_of(epoch, first))
        self._run += 1
        self._requests = self._sampler.requests = _RequestQueue(self._run, epoch, first, last)
        self._batches = self._guarded(lambda: iter(loader))

    def fetch(self, key: tuple[int, int]) -> MadeBatch:
        """Return the batch of a turn. Earlier turns are no longer requested, and their prefetched batches are
        dropped."""
        if self._loader is None:
            raise InvalidInput(CHILD_SAYS)
        requests = self._requests
        requests.skip_to(key[1])
        while requests is self._requests:
            try:
                made = self._next_batch()
            except Exception as error:
                if is_batch_error(error, self._in_process) and requests.next_arrived() < key[1]:
                    continue
                raise
            if made is None:
                break
            made = opened(made)
            if requests.next_arrived() == key[1]:
                return made
        raise CacheError(f"the workers ended before batch {key[1]} of epoch {key[0]}; see their output")

    def _seed_of(self, epoch: int, first: int) -> int:
        feed = self._dataset.feed
        return mix(feed.spec.seed, feed.share.low, epoch, first)

    def _next_batch(self) -> MadeBatch | None:
        made: MadeBatch | None = self._guarded(lambda: next(self._batches, None))
        return made

    def _guarded(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except BaseException as error:  # noqa: BLE001
            if not (isinstance(error, Exception) and is_batch_error(error, self._in_process)):
                # After a worker dies or is interrupted, its queue is in an unknown state: `start` makes new
                # workers.
                self._loader, self._batches = None, iter(())
            # Drop torch's frames, which would keep the workers alive as long as the error is kept.
            error.__context__ = None
            raise error.with_traceback(None) from None

    def stop(self) -> None:
        """End the iteration, complete or not. Workers end unless they persist."""
        self._batches = iter(())

    def abandon(self) -> None:
        """Let go of the parent's workers, in a forked child or a worker: see `_parent_iterators`."""
        _parent_iterators.extend((self._loader, self._batches))
        self._loader, self._batches = None, iter(())

    def _new_loader(self) -> torch.utils.data.DataLoader[Any]:
        abandon_in_children(self)
        return _Loader(
            self._dataset,
            batch_size=None,
            sampler=self._sampler,
            collate_fn=_as_is,
            silence=self._silence,
            **self._settings,
        )
