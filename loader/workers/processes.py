"""Worker processes of the trainer. Each has a pipe of requests and a pipe of answers, and nothing that locks.

A worker makes every W-th turn and answers in the order of its requests, so the trainer reads the pipe of the turn it waits
for. While it waits it watches every worker: the rest of a message of one that dies would never come. A worker ends when the
trainer closes its pipes, and is killed if that takes long.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import select
import signal
import threading
import time
import weakref
from collections.abc import Sequence
from functools import partial
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from typing import Any

import torch

from cachesvc.core.errors import InvalidInput
from cachesvc.core.order.permute import mix
from cachesvc.system.fork_hooks import abandon_in_children, forks_workers
from cachesvc.system.group_signals import held_back
from loader.batches.maker import BatchMaker, MadeBatch
from loader.process.parent_watch import EndsWithTrainer
from loader.process.pickled import CaughtError
from loader.workers.iteration import CHILD_SAYS
from loader.workers.settings import WorkerSettings
from loader.workers.shared_batches import Arena, SentBatch
from loader.workers.worker_process import HEAD, REQUEST, WorkerJob, failed_to_cross, run_worker

FORK_SERVER_PRELOAD = "cachesvc.system.fork_server_preload"
END_S = 5.0
"""How long workers may take to end, all together, as torch waits for one."""
REAP_S = 2.0
"""How long to wait for the exit status of a dead worker."""
TICK_S = 0.25
"""Interval at which a wait for a batch is compared with its limits."""
SILENT_S = 60.0
"""Longer than a batch usually takes, and shorter than the patience of collectives (10 minutes in torch)."""
AFTER_FORK = (
    "If it never does, a thread held a lock when it was forked (Polars starts such threads, for one): give"
    " multiprocessing_context='forkserver' or 'spawn', or worker_type='thread'. Else reading the data or your code"
    " takes so long"
)
OF_OTHERS = "Reading the data or your code takes so long: py-spy dump --pid shows where"
_log = logging.getLogger("cachesvc")


class WorkerPool:
    """Running workers, and the turns requested of them. They end when this object dies, and before multiprocessing joins
    its children at the interpreter's exit."""

    def __init__(
        self, maker: BatchMaker, given: WorkerSettings, base_seed: int, silent_s: float, told: threading.Event
    ) -> None:
        """`silent_s`: seconds after which a worker that sends nothing is named. `told` is set once that has happened."""
        each = given.prefetch_factor or 1
        self.arena = Arena(given.num_workers, each)
        self.processes: list[Any] = []
        self.busy = False
        """A thread waits in `fetch`. Its pool is never begun anew."""
        self.of_parent = False
        """This process was forked after the workers started."""
        self._given, self._silent_s, self._told = given, silent_s, told
        self._count, self._ahead = given.num_workers, given.num_workers * each
        self._requests: list[Connection] = []
        self._answers: list[Connection] = []
        self.end = Finalize(self, _end, (self.processes, self._requests, self._answers), exitpriority=0)
        abandon_in_children(self)
        self._start_all(maker, base_seed)
        self._by_sentinel = {process.sentinel: process for process in self.processes}
        self._polls = [select.poll() for _ in self._answers]
        for poll, pipe in zip(self._polls, self._answers, strict=True):
            for fd in (*self._by_sentinel, pipe.fileno()):
                poll.register(fd, select.POLLIN)
        self._run = self._epoch = self._first = self._next = self._last = 0

    def _start_all(self, maker: BatchMaker, base_seed: int) -> None:
        context = self._given.multiprocessing_context or multiprocessing.get_context()
        method = context.get_start_method()
        if method == "forkserver":
            _start_fork_server(context)
        with held_back(but_ctrl_c=method != "fork"), forks_workers():
            for number in range(self._count):
                self._start(context, maker, number, base_seed)

    def _start(self, context: Any, maker: BatchMaker, number: int, base_seed: int) -> None:
        requested, requests = context.Pipe(duplex=False)
        answers, answered = context.Pipe(duplex=False)
        os.set_blocking(requests.fileno(), False)
        self._requests.append(requests)
        self._answers.append(answers)
        job = WorkerJob(
            EndsWithTrainer(),
            maker,
            self.arena,
            number,
            self._count,
            base_seed,
            self._given.worker_init_fn,
            requested,
            answered,
        )
        process = context.Process(target=run_worker, args=(job,), daemon=True)
        process.start()
        # SIGTERM does not end a worker.
        process.terminate = partial(type(process).kill, weakref.proxy(process))
        self.processes.append(process)
        requested.close()
        answered.close()

    def begin(self, epoch: int, first: int, last: int) -> None:
        """Request the first turns of [first, last). Answers to earlier requests are dropped from now on."""
        self._run += 1
        self._epoch, self._first, self._next, self._last = epoch, first, first, last
        self._request_until(first + self._ahead)

    def fetch(self, turn: int) -> MadeBatch | CaughtError:
        """Return the batch of a turn, or the error of making it. Raises RuntimeError for a dead worker and a timeout."""
        self.busy = True
        worker = (turn - self._first) % self._count
        self._next = max(self._next, turn)
        while True:
            self._request_until(turn + self._ahead)
            run, answered, made = pickle.loads(self._answer(worker))
            if run != self._run:
                continue  # the worker frees its slot itself
            if answered == turn:
                break
            _opened(made)  # a skipped turn's slot becomes free
        self._request_until(turn + 1 + self._ahead)
        self.busy = False
        return _opened(made)

    def _request_until(self, end: int) -> None:
        """Request turns until the pipe of the next one is full: its worker then has hundreds of batches to make."""
        while self._next < min(end, self._last) and self.request(self._next):
            self._next += 1

    def request(self, turn: int) -> bool:
        """Request a turn of its worker. Never blocks. Returns False if the pipe is full."""
        pipe = self._requests[(turn - self._first) % self._count]
        try:
            return os.write(pipe.fileno(), REQUEST.pack(self._run, self._epoch, turn)) > 0
        except (BlockingIOError, BrokenPipeError):  # the wait for a batch raises for a dead worker
            return False

    def _answer(self, worker: int) -> bytearray:
        (size,) = HEAD.unpack(self._read(worker, HEAD.size))
        return self._read(worker, size)

    def _read(self, worker: int, size: int) -> bytearray:
        found = bytearray()
        while len(found) < size:
            self._wait(worker)
            part = os.read(self._answers[worker].fileno(), size - len(found))
            if not part:
                raise RuntimeError(_exit_message([self.processes[worker]]))
            found += part
        return found

    def _wait(self, worker: int) -> None:
        """Wait until a worker's pipe has data. Raises RuntimeError if any worker dies, and after the timeout."""
        began = time.monotonic()
        while not (ready := self._polls[worker].poll(min(TICK_S, self._silent_s) * 1000)):
            self._check(worker, time.monotonic() - began)
        if dead := [self._by_sentinel[fd] for fd, _ in ready if fd in self._by_sentinel]:
            raise RuntimeError(_exit_message(dead))

    def _check(self, worker: int, waited_s: float) -> None:
        """Compare a wait with its limits. A deadlock looks like slow data, so a silent worker is named."""
        if self._given.timeout and waited_s >= self._given.timeout:
            raise RuntimeError(f"DataLoader timed out after {self._given.timeout} seconds")
        if waited_s >= self._silent_s and not self._told.is_set():
            self._told.set()
            forked = isinstance(self.processes[worker], multiprocessing.context.ForkProcess)
            _log.warning(
                "a worker is alive and has sent no batch for %.0f s: pid %s. %s",
                self._silent_s,
                self.processes[worker].pid,
                AFTER_FORK if forked else OF_OTHERS,
            )

    def abandon(self) -> None:
        """Let go of the parent's workers, in a forked child or another worker."""
        self.of_parent = True
        for each in (*self._requests, *self._answers):
            each.close()


def _opened(made: MadeBatch | CaughtError) -> MadeBatch | CaughtError:
    """Return a worker's batch, or a failure if it does not unpickle."""
    if isinstance(made, CaughtError) or not isinstance(made.batch, SentBatch):
        return made
    try:
        return made._replace(batch=made.batch.open())
    except Exception as error:  # noqa: BLE001  values of any class unpickle themselves
        return failed_to_cross(made, "a batch does not unpickle in the trainer", error)


def _exit_message(dead: Sequence[Any]) -> str:
    """Describe dead workers in torch's words."""
    for worker in dead:
        worker.join(REAP_S)
    pids = ", ".join(str(worker.pid) for worker in dead)
    by_signal = [(worker.pid, -worker.exitcode) for worker in dead if (worker.exitcode or 0) < 0]
    killed = ", ".join(
        f"pid {pid} is killed by signal: {signal.strsignal(number)}" for pid, number in by_signal
    )
    message = f"DataLoader worker (pid(s) {pids}) exited unexpectedly" + (f" ({killed})" if killed else "")
    if any(number == signal.SIGBUS for _, number in by_signal):
        message += ": it is possible that workers are out of shared memory; raise its limit"
    return message


def _end(processes: list[Any], requests: list[Connection], answers: list[Connection]) -> None:
    """End workers: at once between two batches, by SIGKILL in a batch that takes long."""
    for each in (*requests, *answers):
        each.close()
    deadline = time.monotonic() + END_S
    try:
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
    finally:
        for process in processes:
            process.kill()
            process.join(REAP_S)


def _start_fork_server(context: Any) -> None:
    """Start multiprocessing's fork server, unless it runs, so that it outlives what its workers outlive."""
    preloaded = forkserver._forkserver._preload_modules  # type: ignore[attr-defined]
    if FORK_SERVER_PRELOAD not in preloaded:
        context.set_forkserver_preload([*preloaded, FORK_SERVER_PRELOAD])
    forkserver.ensure_running()


class ProcessEngine:
    """Makes turns in order in worker processes.

    A forked child leaves its parent's workers alone and gets its own at the next `start`. Without a generator, the
    workers' own generators are seeded by the seed, the rank's share, and the epoch and turn at which they begin.
    """

    def __init__(self, maker: BatchMaker, given: WorkerSettings, silent_s: float = SILENT_S) -> None:
        """`silent_s`: seconds after which a worker that sends nothing is named, once."""
        self._maker, self._given = maker, given
        self._silent = silent_s, threading.Event()
        self._pool: WorkerPool | None = None

    @property
    def processes(self) -> list[Any]:
        """The running workers, in order."""
        return [] if self._pool is None else list(self._pool.processes)

    @property
    def arena(self) -> Arena | None:
        """The memory of their batches."""
        return None if self._pool is None else self._pool.arena

    def start(self, epoch: int, first: int, last: int) -> None:
        """Begin to make the turns [first, last) of an epoch."""
        self.stop()
        if self._pool is None or self._pool.busy or self._pool.of_parent:
            self._pool = None  # the old workers end first
            self._pool = WorkerPool(self._maker, self._given, self._base_seed(epoch, first), *self._silent)
        self._pool.begin(epoch, first, last)

    def fetch(self, key: tuple[int, int]) -> MadeBatch:
        """Return the batch of a turn. Earlier turns are no longer requested, and their prefetched batches are
        dropped."""
        pool = self._pool
        if pool is None or pool.of_parent:
            raise InvalidInput(CHILD_SAYS)
        try:
            made = pool.fetch(key[1])
        except BaseException:
            # After a worker dies or is interrupted, its pipes are in an unknown state: `start` makes new workers.
            if self._pool is pool:
                self._pool = None
            pool.end()
            raise
        if isinstance(made, CaughtError):
            raise made.to_raise()
        return made

    def stop(self) -> None:
        """End the iteration, complete or not. Workers end unless they persist."""
        pool = self._pool
        if pool is not None and not self._given.persistent_workers:
            self._pool = None
            if not pool.busy:  # else it ends when the thread that waits in it leaves
                pool.end()

    def _base_seed(self, epoch: int, first: int) -> int:
        """Draw the seed of the workers' generators, as torch does."""
        feed, generator = self._maker.feed, self._given.generator
        if generator is None:
            generator = torch.Generator().manual_seed(mix(feed.spec.seed, feed.share.low, epoch, first))
        return int(torch.empty((), dtype=torch.int64).random_(generator=generator))
