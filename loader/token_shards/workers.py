"""Tokenises shards in processes of their own. Each takes the next shard that is missing, until there is none.

They are forked, as a DataLoader's workers are, so that torch is imported once.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

from cachesvc.core.errors import CacheError, from_code
from cachesvc.system.fork_hooks import forks_workers
from loader.datasets.dataset import Dataset
from loader.process.parent_watch import end_with
from loader.token_shards.shards import Shard, write_shard
from loader.token_shards.tokenizer import Tokenizer

_FORK = multiprocessing.get_context("fork")
SHOWN_S = 0.25
"""Seconds between two reports of progress."""


@dataclass(frozen=True, slots=True)
class Work:
    """The arguments of each process, and two shared counters: `taken`, the shards that were begun, and `done_bytes`, the
    bytes of the source that were tokenised."""

    parent: int
    dataset: Dataset
    tokenizer: Tokenizer
    shards: Sequence[Shard]
    taken: Any
    done_bytes: Any


def tokenised(
    dataset: Dataset, tokenizer: Tokenizer, shards: Sequence[Shard], processes: int
) -> Iterator[int]:
    """Write shards in `processes` processes; yield the bytes that are done. Raises the first error of a process, and
    CacheError for a process that was killed."""
    work = Work(os.getpid(), dataset, tokenizer, shards, _FORK.Value("q", 0), _FORK.Value("q", 0))
    with _started(work, min(processes, len(shards))) as running:
        while running:
            for ended in wait(list(running), SHOWN_S):
                assert isinstance(ended, Connection), "only connections are waited for"
                _check(ended, running.pop(ended))
            yield work.done_bytes.value


@contextmanager
def _started(work: Work, processes: int) -> Iterator[dict[Connection, Any]]:
    """Start processes, by the connection on which each says how it ended. None outlives the block."""
    running, started = dict[Connection, Any](), list[Any]()
    try:
        for _ in range(processes):
            ours, theirs = _FORK.Pipe(duplex=False)
            process = _FORK.Process(target=_run, args=(work, theirs), daemon=True)
            with forks_workers():
                process.start()
            theirs.close()
            started.append(process)
            running[ours] = process
        yield running
    finally:
        for process in started:
            process.terminate()
            process.join()


def _check(ended: Connection, process: Any) -> None:
    try:
        code, message = ended.recv()
    except EOFError:
        process.join()
        raise CacheError(
            f"a process that tokenises ended with exit code {process.exitcode}; it may have had too little memory: "
            "give --processes fewer"
        ) from None
    if code:
        raise from_code(code, message)


def _run(work: Work, told: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent, and that ends this process
    end_with(work.parent, None)
    try:
        while (number := _next(work)) < len(work.shards):
            write_shard(work.shards[number], work.dataset, work.tokenizer, partial(_count, work))
    except CacheError as error:
        told.send((error.code, str(error)))
    else:
        told.send((0, ""))


def _next(work: Work) -> int:
    with work.taken.get_lock():
        work.taken.value += 1
        return int(work.taken.value) - 1


def _count(work: Work, size_bytes: int) -> None:
    with work.done_bytes.get_lock():
        work.done_bytes.value += size_bytes
