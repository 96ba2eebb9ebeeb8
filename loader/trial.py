"""The process that `cachesvc try` starts: `python -m loader.trial JOB FD`, where JOB is JSON of `Job`.

It writes JSON to the pipe FD, one object a line: what the data is, then the figures of each pass, or {"error", "code"}.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from cachesvc.catalog.catalog import Catalog
from cachesvc.catalog.formats.all_formats import FORMATS
from cachesvc.catalog.sample_places import places_of
from cachesvc.sources.uri import local_path
from cachesvc.system.descriptors import closing_fd
from loader.dataloader import DataLoader
from loader.datasets.dataset import Dataset, open_dataset
from loader.prepare_ahead import function_of
from loader.process.command_job import run_job, say
from loader.reading.direct.shared_rate import VARIABLE
from loader.reading.reader import Ints

BATCH = 32
SHARES = {"plain": (0.3, 0.15), "cachesvc": (0.35, 0.2)}
"""Parts of the time that the first and the second pass of each way take."""
FORGOTTEN = 20_000
"""Local files that the kernel is asked to drop from its page cache before a first pass; more would take long."""


@dataclass(frozen=True, slots=True)
class Job:
    """`function`: `module:function` for `transform=`, or "". `seconds`: of all passes. `folder`: for catalogs.
    `kept_bytes`: the data that is tried, at most. `given`: further arguments of `open_dataset`."""

    uri: str
    function: str
    workers: int
    seconds: float
    folder: str
    kept_bytes: int
    given: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Pass:
    """The samples that a pass made, how long it took, and the parts of its time that it waited, by cause."""

    way: str
    warm: bool
    samples: int
    took_s: float
    waits: dict[str, float]


class PlainSamples(torch.utils.data.IterableDataset[list[Any]]):
    """Batches that each worker reads by itself, one sample after the other, as a script without a cache does."""

    def __init__(self, dataset: Dataset, groups: Sequence[Ints]) -> None:
        """`groups`: indices that one worker reads in sequence."""
        self._dataset, self._groups = dataset, groups

    def __iter__(self) -> Iterator[list[Any]]:
        worker = torch.utils.data.get_worker_info()
        number, count = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for group in self._groups[number::count]:
            for begin in range(0, len(group), BATCH):
                yield [self._dataset[index] for index in group[begin : begin + BATCH].tolist()]


def tried(catalog: Catalog, kept_bytes: int) -> list[Ints]:
    """Return the samples of some extents, chosen at random, by extent: at most so many bytes, one extent at least."""
    chosen: list[Ints] = []
    left = kept_bytes
    for extent in np.random.default_rng(0).permutation(len(catalog.extent_sizes)).tolist():
        left -= int(catalog.extent_sizes[extent])
        if left < 0 and chosen:
            break
        chosen.append(np.arange(catalog.extent_first[extent], catalog.extent_first[extent + 1]))
    return [group for group in chosen if len(group)]


def run(job: Job) -> None:
    """Run the passes, and say what each took."""
    os.environ["XDG_CACHE_HOME"], os.environ[VARIABLE] = job.folder, "1TiB"
    if job.function:
        job.given["transform"] = function_of(job.function)
    ours = open_dataset(job.uri, **job.given)
    catalog, groups = ours.catalog, tried(ours.catalog, job.kept_bytes)
    ids = np.concatenate(groups)
    single = FORMATS[catalog.format].file_is_sample
    say(
        dataset=catalog.id,
        format=catalog.format,
        samples=len(ours),
        size_bytes=int(catalog.extent_sizes.sum()),
        tried=len(ids),
        single=single,
    )
    if single:  # one read a sample, at random
        groups = np.array_split(np.random.default_rng(1).permutation(ids), -(-len(ids) // BATCH))
    # Extents of one small object are read like the object alone.
    job.given["extent_bytes"] = 4096 if single else 0
    os.environ["CACHESVC"] = "off"
    plain = open_dataset(job.uri, **job.given)
    os.environ["CACHESVC"] = "require"
    for warm in (False, True):
        if not warm:
            _forget(catalog, ids)
        batches = torch.utils.data.DataLoader(
            PlainSamples(plain, groups), batch_size=None, num_workers=job.workers
        )
        say(**asdict(_pass(batches, "plain", warm, job.seconds)))
    _forget(catalog, ids)
    first = DataLoader(ours.select(ids), BATCH, shuffle=True, num_workers=job.workers, collate_fn=list)
    seen: list[Ints] = []
    found = _pass(_noting(first, seen), "cachesvc", False, job.seconds)
    say(**asdict(replace(found, waits=first.stats().wait_by_cause_s)))
    resident = ours.select(np.unique(ids[np.concatenate(seen)]))
    second = DataLoader(resident, BATCH, shuffle=True, num_workers=job.workers, collate_fn=list, epochs=None)
    found = _pass(second, "cachesvc", True, job.seconds)
    say(**asdict(replace(found, waits=second.stats().wait_by_cause_s)))


def _noting(batches: DataLoader[Any], seen: list[Ints]) -> Iterator[list[Any]]:
    """Yield the batches, and note the indices of each."""
    for batch in batches:
        seen.append(batches.indices[: batches.valid].copy())
        yield batch


def _pass(batches: Iterable[list[Any]], way: str, warm: bool, seconds: float) -> Pass:
    """Take batches for this pass's part of the time, or to their end."""
    samples, begun = 0, time.perf_counter()
    until = begun + SHARES[way][warm] * seconds
    for batch in batches:
        samples += len(batch)
        if time.perf_counter() >= until:
            break
    return Pass(way, warm, samples, time.perf_counter() - begun, {})


def _forget(catalog: Catalog, ids: Ints) -> None:
    """Have the kernel drop the pages of local files, so that a first pass reads the disk."""
    if local_path(catalog.uri) is None:
        return
    paths = {local_path(place.object) for places in places_of(catalog, ids) for place in places}
    for path in list(filter(None, paths))[:FORGOTTEN]:
        with closing_fd(os.open(path, os.O_RDONLY | os.O_CLOEXEC)) as file:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    sys.exit(run_job(lambda given: run(Job(**given))))
