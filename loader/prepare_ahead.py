"""The process that `cachesvc prepare` starts: `python -m loader.prepare_ahead JOB FD`, where JOB is JSON of `Job`.

It writes JSON to the pipe FD, one object a line: what the data is and what a sample costs, then {"ready"} once its
processes prepare, or {"error", "code"}. It ends when it is terminated.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cachesvc.catalog.layout import OFFSET_BYTES
from cachesvc.core.errors import InvalidInput, is_bad_sample
from loader.datasets.dataset import Dataset, open_dataset
from loader.datasets.preparing import PreparingSource
from loader.prepare.uneven import record_of
from loader.process.command_job import run_job, say

TIMED = 100
"""The samples whose cost is measured."""


@dataclass(frozen=True, slots=True)
class Job:
    """A dataset and the function that prepares it. `given`: further arguments of `open_dataset`. No `workers`: nothing is
    prepared."""

    uri: str
    function: str
    name: str
    max_bytes: int
    workers: int
    given: dict[str, Any]


def function_of(named: str) -> Callable[[Any], Any]:
    """Import `module:function`. Raises InvalidInput."""
    module, _, name = named.partition(":")
    if not module or not name:
        raise InvalidInput(f"--with {named}: give MODULE:FUNCTION, such as train.data:resize256")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise InvalidInput(
            f"--with {named}: {error}; run it where Python finds the module (PYTHONPATH)"
        ) from error
    if not callable(found):
        raise InvalidInput(f"--with {named} is no function")
    return found  # type: ignore[no-any-return]


def run(job: Job) -> None:
    """Open the dataset, say what it will cost, and prepare until this process is terminated."""
    dataset = open_dataset(
        job.uri,
        prepare=function_of(job.function),
        prepare_name=job.name,
        prepare_max_bytes=job.max_bytes,
        **job.given,
    )
    source = dataset.preparing
    if source is None:
        raise InvalidInput("no daemon keeps what is prepared; start one: cachesvc serve")
    seconds, size_bytes = cost_of(source)
    say(
        dataset=dataset.opened.link.id,
        samples=len(dataset),
        size_bytes=round(len(dataset) * size_bytes),
        sample_s=seconds,
    )
    dataset.close()
    context, ready = multiprocessing.get_context("fork"), multiprocessing.get_context("fork").Semaphore(0)
    processes = [
        context.Process(target=_serve, args=(dataset, source, os.getpid(), ready.release), daemon=True)
        for _ in range(job.workers)
    ]
    for process in processes:
        process.start()
    for _ in processes:
        ready.acquire()
    if processes:
        say(ready=len(processes))
        for process in processes:
            process.join()


def cost_of(source: PreparingSource) -> tuple[float, float]:
    """Return the CPU seconds and the bytes of a sample, the means of the first `TIMED`."""
    count, begun = min(TIMED, source.catalog.samples), time.process_time()
    samples, form, sizes = source.samples(np.arange(count)), source.form, list[int]()
    try:
        for sample in samples:
            sizes.append(
                len(record_of(form, sample)) + OFFSET_BYTES if form.most_bytes else form.stride_bytes
            )
    except Exception as error:  # it is kept in place of its sample
        if not is_bad_sample(error):
            raise
    mean = sum(sizes) / len(sizes) if sizes else form.stride_bytes
    return (time.process_time() - begun) / max(1, len(sizes)), mean


def _serve(dataset: Dataset, source: PreparingSource, parent: int, ready: Callable[[], None]) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    source.serve(dataset.opened, ready, lambda: os.getppid() != parent)


if __name__ == "__main__":
    sys.exit(run_job(lambda given: run(Job(**given))))
