"""JPEGs decoded in two workers, against the decoder alone on the same two cores, in turn."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from bench.peers import corpus, limit, ours
from bench.peers.peer import Job
from bench.warm import RUNS, Figure, rate

IMAGES = 3_200
"""Epochs of 1.7 s: one costs 25 ms to begin and to end, which is not decoding."""
WORKERS = 2
ASKED = 0.95


def write_data(folder: Path) -> Job:
    """The images, and the tars of them that are to be uploaded from `job.folder`."""
    job = Job(
        "cachesvc",
        "images",
        str(folder / "corpus"),
        str(folder / "tars"),
        IMAGES,
        corpus.BATCH["images"],
        WORKERS,
    )
    corpus.write(Path(job.corpus), {"images": IMAGES})
    Path(job.folder).mkdir()
    ours.write(job)
    return job


def measure(job: Job) -> list[Figure]:
    """Whole epochs, so that nothing counts that was made before the clock began. The limit is the decoder in as many
    processes, for our threads too: the cores can do that much."""
    found = []
    with _on_cores(WORKERS):
        alone = limit.batches(replace(job, remote=""))
        for name, threads in (("processes", False), ("threads", True)):
            batches = ours.batches(replace(job, threads=threads))
            figure = Figure(f"JPEGs of 500 x 375, two {name}", [], [], ASKED)
            for each in (batches, alone):
                rate(iter(each), job.samples)  # not counted: workers start
            for _ in range(RUNS):
                figure.ours.append(rate(iter(batches), job.samples))
                figure.limit.append(rate(iter(alone), job.samples))
            found.append(figure)
    return found


@contextmanager
def _on_cores(count: int) -> Iterator[None]:
    """This thread, and what it starts, on so many cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:count])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
