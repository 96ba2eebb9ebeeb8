"""Worker processes of the trainer. They read requests from a pipe, each answers by a pipe of its own, and nothing locks.

The workers share one pipe of requests, so that whichever is idle makes the next turn, and a slow batch holds up one worker
alone. A request is shorter than PIPE_BUF, so that each goes to one worker whole. Where the user seeds workers themselves
(`generator`, `worker_init_fn`), each has a pipe of requests, and makes every W-th turn, as in torch.

While the trainer waits it watches every worker. One that dies is replaced, and what it made or owed is made again; the turn
that it died of is made sample by sample, so that a sample of which another worker dies is known, and becomes that sample's
error. A worker ends when the trainer closes its pipes, and is killed if that takes long.
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
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
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
DIES_S = 0.5
"""How long a worker whose sockets are closed may take to die."""
REAP_S = 2.0
"""How long to wait for the exit status of a dead worker."""
TICK_S = 0.25
"""Interval at which a wait for a batch is compared with its limits."""
AHEAD = 4
"""Batches for each worker that are under way at least, while all of them take `AHEAD_BYTES` at most: one batch that takes
as long as several others then delays no other."""
AHEAD_BYTES = 256 << 20
MAX_REPLACED = 3
"""How many workers may die of one batch without a sample that is known, and how often each may die before one answers."""
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
        self._shared = seeds_by_batch(given)
        self.arena = Arena(given.num_workers, 2 * max(each, AHEAD) if self._shared else each)
        self.processes: list[Any] = []
        self.busy = False
        """A thread waits in `fetch`. Its pool is never begun anew."""
        self.of_parent = False
        """This process was forked after the workers started."""
        self._given, self._silent_s, self._told = given, silent_s, told
        self._count, self._ahead = given.num_workers, given.num_workers * each
        self._least_ahead, self._made = self._ahead, dict[int, MadeBatch | CaughtError]()
        self._requests: list[Connection] = []
        self._requested: list[Connection] = []
        """The workers' ends of the pipes of requests, for workers that replace dead ones."""
        self._answers: list[Connection] = []
        ends = self._requests, self._requested, self._answers
        self.end = Finalize(self, _end, (self.processes, *ends), exitpriority=0)
        abandon_in_children(self)
        self._context = given.multiprocessing_context or multiprocessing.get_context()
        self._maker, self._base_seed = maker, base_seed
        for _ in range(1 if self._shared else self._count):
            requested, requests = self._context.Pipe(duplex=False)
            os.set_blocking(requests.fileno(), False)
            self._requested.append(requested)
            self._requests.append(requests)
        self._start_workers(range(self._count))
        self._run = self._epoch = self._first = self._next = self._last = 0
        self._died_of = Counter[int]()
        """Turns of this run, by how many workers died of them."""
        self._replaced = 0
        """How often workers were replaced since the last answer."""

    def _start_workers(self, numbers: Iterable[int]) -> None:
        method = self._context.get_start_method()
        if method == "forkserver":
            _start_fork_server(self._context)
        with held_back(but_ctrl_c=method != "fork"), forks_workers():
            for number in numbers:
                self._start(number)
        self._by_sentinel = {process.sentinel: number for number, process in enumerate(self.processes)}
        self._by_answers = {pipe.fileno(): number for number, pipe in enumerate(self._answers)}
        self._poll = _poll((*self._by_sentinel, *self._by_answers))
        self._polls = [_poll(each) for each in zip(self._by_sentinel, self._by_answers, strict=True)]

    def _start(self, number: int) -> None:
        """Start a worker, also in the place of a dead one."""
        requested = Connection(
            os.dup(self._requested[number % len(self._requested)].fileno()), writable=False
        )
        answers, answered = self._context.Pipe(duplex=False)
        job = WorkerJob(
            EndsWithTrainer(),
            self._maker,
            self.arena,
            number,
            self._count,
            self._base_seed,
            self._given.worker_init_fn,
            self._shared,
            requested,
            answered,
        )
        process: Any = self._context.Process(target=run_worker, args=(job,), daemon=True)
        process.start()
        # SIGTERM does not end a worker.
        process.terminate = partial(type(process).kill, weakref.proxy(process))
        self._answers[number : number + 1] = [answers]
        self.processes[number : number + 1] = [process]
        requested.close()
        answered.close()

    def begin(self, epoch: int, first: int, last: int) -> None:
        """Request the first turns of [first, last). Answers to earlier requests are dropped from now on."""
        self._begin_run()
        self._died_of.clear()
        self._epoch, self._first, self._next, self._last = epoch, first, first, last
        self._request_until(first + self._ahead)

    def _begin_run(self) -> None:
        """Drop all requests and answers. Workers free the slots of answers when they get the next request."""
        self._run += 1
        self.arena.begin_run(self._run)
        self._made.clear()

    def fetch(self, turn: int) -> MadeBatch | CaughtError:
        """Return the batch of a turn, or the error of making it. Raises as `_replace`, and after the timeout."""
        self.busy = True
        self._next = max(self._next, turn)
        for skipped in [each for each in self._made if each < turn]:
            _drop(self._made.pop(skipped))
        while True:
            made = self._received(turn)
            try:
                opened = _open(made)
                break
            except Exception as error:  # noqa: BLE001  values of any class unpickle themselves
                assert isinstance(made, MadeBatch), "an error opens"
                if not self._replace_dead(turn, error):
                    opened = failed_to_cross(made, "a batch does not unpickle in the trainer", error)
                    break
        self._request_until(turn + 1 + self._ahead)
        self.busy = False
        return opened

    def _received(self, turn: int) -> MadeBatch | CaughtError:
        began = time.monotonic()
        while turn not in self._made:
            self._request_until(turn + self._ahead)
            if not self._receive(turn, began):
                began = time.monotonic()
        return self._made.pop(turn)

    def _replace_dead(self, turn: int, error: Exception) -> bool:
        """Replace workers that died before what they sent was opened: torch fetches shared memory from the worker. Returns
        False if none did. Raises as `_replace`."""
        if not isinstance(error, (OSError, EOFError)):
            return False
        dead = [self._by_sentinel[fd] for fd in wait(list(self._by_sentinel), DIES_S) if isinstance(fd, int)]
        if dead:
            self._replace(sorted(dead), turn)
        return bool(dead)

    def _request_until(self, end: int) -> None:
        """Request turns until the pipe of the next one is full: its worker then has hundreds of batches to make."""
        while self._next < min(end, self._last) and self.request(self._next):
            self._next += 1

    def request(self, turn: int) -> bool:
        """Request a turn. Never blocks. Returns False if the pipe is full."""
        pipe = self._requests[(turn - self._first) % len(self._requests)]
        try:
            return (
                os.write(pipe.fileno(), REQUEST.pack(self._run, self._epoch, turn, turn in self._died_of)) > 0
            )
        except BlockingIOError:
            return False

    def _receive(self, turn: int, began: float) -> bool:
        """Keep the next answer of each worker that has one, and free those of turns before `turn`. Returns False if workers
        died and were replaced, and all turns are to be requested again. Raises as `_replace`, and after the timeout."""
        while not (ready := self._poll.poll(min(TICK_S, self._silent_s) * 1000)):
            self._check(turn, time.monotonic() - began)
        dead = {self._by_sentinel[fd] for fd, _ in ready if fd in self._by_sentinel}
        for fd, _ in ready:
            if fd in self._by_answers and (worker := self._by_answers[fd]) not in dead:
                message = self._message(worker, turn, began)
                if message is None:
                    dead.add(worker)
                else:
                    self._keep(turn, message)
        if dead:
            self._replace(sorted(dead), turn)
        return not dead

    def _keep(self, turn: int, message: bytearray) -> None:
        run, answered, made = pickle.loads(message)
        self._replaced = 0
        if run != self._run:
            return
        if answered < turn:
            _drop(made)
            return
        self._made[answered] = made
        if self._shared:
            sent = made.batch if isinstance(made, MadeBatch) else None
            size = max(len(message), sent.size_bytes if isinstance(sent, SentBatch) else 0)
            self._ahead = max(self._least_ahead, min(AHEAD * self._count, AHEAD_BYTES // size))

    def _message(self, worker: int, turn: int, began: float) -> bytearray | None:
        """Read a worker's answer; None if it dies before all of it has come."""
        head = self._read(worker, HEAD.size, turn, began)
        if head is None:
            return None
        (size,) = HEAD.unpack(head)
        return self._read(worker, size, turn, began)

    def _read(self, worker: int, size: int, turn: int, began: float) -> bytearray | None:
        found, pipe = bytearray(), self._answers[worker].fileno()
        while len(found) < size:
            while not (ready := self._polls[worker].poll(TICK_S * 1000)):
                self._check(turn, time.monotonic() - began)
            part = os.read(pipe, size - len(found)) if pipe in dict(ready) else b""
            if not part:
                return None
            found += part
        return found

    def _replace(self, dead: Sequence[int], turn: int) -> None:
        """Start workers in the place of dead ones, and begin again at `turn`. Raises RuntimeError, in torch's words, where
        that cannot help: they die again and again, and of no sample that could be left out."""
        message = _exit_message([self.processes[worker] for worker in dead])
        hopeless = False
        for worker in dead:
            made, sample = self.arena.making(worker)
            self.arena.end(worker)
            if made is not None:
                self._died_of[made] += 1
                hopeless |= (
                    self._died_of[made] > MAX_REPLACED
                    if sample is None
                    else not self.arena.add_deadly(sample)
                )
        self._replaced += 1
        if hopeless or self._replaced > MAX_REPLACED * self._count:
            raise RuntimeError(message)
        _log.warning("%s; another takes its place and makes its batches again", message)
        for worker in dead:
            self._answers[worker].close()
        self._start_workers(dead)
        self._begin_run()
        self._next = turn

    def _check(self, turn: int, waited_s: float) -> None:
        """Compare a wait with its limits. A deadlock looks like slow data, so a silent worker is named."""
        if self._given.timeout and waited_s >= self._given.timeout:
            raise RuntimeError(f"DataLoader timed out after {self._given.timeout} seconds")
        if waited_s >= self._silent_s and not self._told.is_set():
            self._told.set()
            worker = self.processes[self.arena.maker_of(turn)]
            forked = isinstance(worker, multiprocessing.context.ForkProcess)
            _log.warning(
                "a worker is alive and has sent no batch for %.0f s: pid %s. %s",
                self._silent_s,
                worker.pid,
                AFTER_FORK if forked else OF_OTHERS,
            )

    def abandon(self) -> None:
        """Let go of the parent's workers, in a forked child or another worker."""
        self.of_parent = True
        for each in (*self._requests, *self._requested, *self._answers):
            each.close()


def _poll(fds: Iterable[int]) -> select.poll:
    found = select.poll()
    for fd in fds:
        found.register(fd, select.POLLIN)
    return found


def seeds_by_batch(given: WorkerSettings) -> bool:
    """Tell whether the generators of torch, numpy and Python are seeded for each batch, so that it does not matter which
    worker makes it; otherwise once, as the user or torch seeds them."""
    return given.worker_init_fn is None and given.generator is None


def _open(made: MadeBatch | CaughtError) -> MadeBatch | CaughtError:
    """Return a worker's batch. Raises what unpickling it raises."""
    if isinstance(made, CaughtError) or not isinstance(made.batch, SentBatch):
        return made
    return made._replace(batch=made.batch.open())


def _drop(made: MadeBatch | CaughtError) -> None:
    """Free the slot of a worker's batch."""
    with suppress(Exception):  # values of any class unpickle themselves
        _open(made)


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


def _end(processes: list[Any], *pipes: list[Connection]) -> None:
    """End workers: at once between two batches, by SIGKILL in a batch that takes long."""
    for each in chain.from_iterable(pipes):
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
        """Draw the seed of the workers' generators, as torch does, or return the seed of all batches of this rank."""
        feed, generator = self._maker.feed, self._given.generator
        if seeds_by_batch(self._given):
            return mix(feed.spec.seed, feed.share.low) >> 1
        if generator is None:
            generator = torch.Generator().manual_seed(mix(feed.spec.seed, feed.share.low, epoch, first))
        return int(torch.empty((), dtype=torch.int64).random_(generator=generator))
