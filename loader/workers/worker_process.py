"""A worker process: it reads requests from one pipe, makes each turn's batch in shared memory, and answers over another."""

from __future__ import annotations

import os
import pickle
import random
import struct
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data._utils import worker as torch_worker

from cachesvc.core.errors import CorruptData, InvalidInput
from cachesvc.core.order.permute import mix
from cachesvc.system.group_signals import outlive_group_signals
from loader.batches.feed import Feed
from loader.batches.maker import BatchMaker, MadeBatch
from loader.batches.turns import BatchKey
from loader.process.parent_watch import EndsWithTrainer
from loader.process.pickled import CaughtError, pickled
from loader.workers.shared_batches import Arena

PASSED_EVERY_S = 1.0
"""Interval at which a worker reports its position. A worker has no plan of its own; a restarted daemon learns from
the report what the worker still holds."""
PLAIN_VALUES = (
    "return tensors, arrays, numbers and text from your transform or collate_fn (of an image: its pixels), or give"
    " worker_type='thread'"
)
DEADLY_ADVICE = "repair it, leave it out of the dataset, or give on_error='skip'"
REQUEST = struct.Struct("=3q?")
"""A request: the number of the trainer's iteration, the epoch, the turn, and whether to make its samples one by one, since
a worker died of it. Shorter than PIPE_BUF, so that a write is atomic."""
HEAD = struct.Struct("=Q")
"""The length before each answer, which is a pickled (iteration, turn, MadeBatch or CaughtError)."""


class WorkerJob(NamedTuple):
    """The start arguments of a worker. A spawned one unpickles it in this order."""

    tie: EndsWithTrainer | None
    maker: BatchMaker
    arena: Arena
    number: int
    workers: int
    base_seed: int
    init: Callable[[int], None] | None
    seeds_by_batch: bool
    requests: Connection
    answers: Connection


def run_worker(job: WorkerJob) -> None:
    """Answer requests until the trainer closes the pipes."""
    if job.tie is not None:
        job.tie()
    outlive_group_signals()
    _set_up_torch(job)
    answer, where = _answerer(job), f"in DataLoader worker process {job.number}"
    while request := os.read(job.requests.fileno(), REQUEST.size):
        run, epoch, turn, one_by_one = REQUEST.unpack(request)
        if not job.arena.runs(run):
            continue
        job.arena.begin(job.number, turn)
        try:
            made: MadeBatch | CaughtError = answer(run, BatchKey(epoch, turn), one_by_one)
        except Exception as error:  # noqa: BLE001  raised again in the trainer
            made = CaughtError.of(error, where)
        body = pickle.dumps((run, turn, made))
        try:
            _write(job.answers.fileno(), HEAD.pack(len(body)) + body)
        except BrokenPipeError:
            return
        job.arena.end(job.number)
        del made, body


def _set_up_torch(job: WorkerJob) -> None:
    """Set up this process as torch sets up a worker: one thread, the same seeds, and what get_worker_info() returns."""
    torch.set_num_threads(1)
    seed = job.base_seed + job.number
    torch.manual_seed(seed)
    words = [job.number, job.base_seed & 0xFFFFFFFF, job.base_seed >> 32, 0]
    _seed(seed, np.random.SeedSequence(words).generate_state(4))
    # Users call torch's get_worker_info, which reads this variable. There is no public way to set it.
    torch_worker._worker_info = torch_worker.WorkerInfo(
        id=job.number, num_workers=job.workers, seed=seed, dataset=job.maker.feed.dataset
    )


def _seed(seed: int, words: Any) -> None:
    """Seed the generators of Python, torch and numpy, the last one with 32-bit words."""
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    np.random.seed(words)


def _answerer(job: WorkerJob) -> Callable[[int, BatchKey, bool], MadeBatch | CaughtError]:
    """Run the user's worker_init_fn. Returns the function that makes batches, or one that returns the error of it."""
    try:
        if job.init is not None:
            job.init(job.number)
    except Exception as error:  # noqa: BLE001  raised again in the trainer
        failed = CaughtError.of(error, f"in DataLoader worker process {job.number}")
        return lambda run, turn, one_by_one: failed
    return _Answers(job).make


def _write(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]


class _Answers:
    """Makes batches in this worker's slots."""

    def __init__(self, job: WorkerJob) -> None:
        self._maker, self._arena, self._number = job.maker, job.arena, job.number
        self._base_seed = job.base_seed if job.seeds_by_batch and job.maker.feed.runs_python else None
        self._run = 0
        self._passed_at = 0.0

    def make(self, run: int, turn: BatchKey, one_by_one: bool) -> MadeBatch:
        """Return the batch of a turn, handed over to the trainer. Raises errors of making it that have no code."""
        if run != self._run:
            self._run = run
            self._arena.take_back(self._number)
        feed, slot = self._maker.feed, self._arena.free_slot(self._number)
        feed.empty = slot.empty if slot is not None else None
        if self._base_seed is not None:
            seed = mix(self._base_seed, *turn)
            _seed(seed, [seed & 0xFFFFFFFF, seed >> 32])
        deadly = self._arena.deadly()
        one_by_one = one_by_one or (len(deadly) > 0 and bool(np.isin(feed.indices(*turn)[0], deadly).any()))
        feed.begin_sample = partial(self._begin_sample, deadly) if one_by_one else None
        made = self._maker.make(turn)
        if made.report.failure is None:
            try:
                made = made._replace(batch=self._arena.send(made.batch, slot))
            except Exception as error:  # noqa: BLE001  values of any class pickle themselves
                what = f"{_culprit(made.batch, feed, turn)} cannot be sent from its worker to the trainer"
                made = failed_to_cross(made, what, error)
        if (now := time.monotonic()) >= self._passed_at:
            self._passed_at = now + PASSED_EVERY_S
            feed.passed(turn.turn)
        return made

    def _begin_sample(self, deadly: npt.NDArray[np.int64], sample: int) -> None:
        if sample in deadly:
            name = self._maker.feed.key_of(sample) or f"sample {sample}"
            raise CorruptData(f"{name} ended the worker that made it, twice; {DEADLY_ADVICE}")
        self._arena.begin_sample(self._number, sample)


def failed_to_cross(made: MadeBatch, what: str, error: Exception) -> MadeBatch:
    """Return a batch as a failure of its turn: it does not pickle or unpickle."""
    cause = f"{type(error).__name__}: {' '.join(str(error).split())}"
    failure = InvalidInput.code, f"{what}: {cause}; {PLAIN_VALUES}"
    return MadeBatch(None, replace(made.report, failure=failure))


def _culprit(batch: Any, feed: Feed, turn: BatchKey) -> str:
    """Name the sample that does not pickle in a list of samples, otherwise the batch."""
    indices = feed.indices(*turn)[0]
    if type(batch) is list and len(batch) == len(indices):
        for index, sample in zip(indices.tolist(), batch, strict=True):
            try:
                pickled(sample)
            except Exception:  # noqa: BLE001  values of any class pickle themselves
                return feed.key_of(index) or f"sample {index}"
    return f"batch {turn.turn} of epoch {turn.epoch}"
