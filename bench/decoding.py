"""JPEGs decoded in two workers, alternating with the decoder alone on the same two cores."""

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
"""An epoch takes 1.7 s, so that its 25 ms of start and end hardly count."""
WORKERS = 2
ASKED = 0.95


def write_data(folder: Path) -> Job:
    """Write the images, and tars of them into `job.folder` for the upload."""
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
    """Time whole epochs, so that no batch was made before the clock started. The limit is the decoder in as many
    processes. It bounds our threads too: it shows what the cores can do."""
    rows = []
    with _on_cores(WORKERS):
        alone = limit.batches(replace(job, remote=""))
        for name, threads in (("processes", False), ("threads", True)):
            batches = ours.batches(replace(job, threads=threads))
            figure = Figure(f"JPEGs of 500 x 375, two {name}", [], [], ASKED)
            for each in (batches, alone):
                rate(iter(each), job.samples)  # untimed: workers start
            for _ in range(RUNS):
                figure.ours.append(rate(iter(batches), job.samples))
                figure.limit.append(rate(iter(alone), job.samples))
            rows.append(figure)
    return rows


@contextmanager
def _on_cores(count: int) -> Iterator[None]:
    """Confine this thread, and what it starts, to `count` cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:count])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
