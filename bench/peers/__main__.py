"""`python -m bench.peers write|warm|dropped|cold JOB`: take one measurement of one peer, print it as a line of JSON.

`bench.compare` runs it in the virtual environment where the peer is installed. Imports end before a clock starts.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.peers import corpus
from bench.peers.peer import UNTUNED, Batches, Job, Peer
from testbed.memory import drop_page_cache, settle
from testbed.usage import anonymous_bytes, cpu_s, family

MODULES = {
    "cachesvc": "ours",
    "limit": "limit",
    "MosaicML Streaming": "mosaic",
    "litData": "litdata",
    "WebDataset": "webdataset",
    "DataLoader, files": "files",
    "DataLoader, memmap": "memmap",
    UNTUNED: "memmap",
    "DataLoader, LMDB": "lmdb",
}
WALL_FACTOR = 2.5
"""A timed run ends after this many times its seconds, epoch starts included."""
MEMORY_POINTS, MEMORY_S = 6, 1.0
_now = time.perf_counter


@dataclass
class Seen:
    """Count of samples and bytes in batches."""

    samples: int = 0
    bytes: int = 0

    def add(self, batch: Any) -> None:
        """Count one batch, in either form that `peer.Batches` names."""
        if isinstance(batch, tuple):
            self.samples += len(batch[1]) - 1
            self.bytes += batch[0].nbytes
        else:
            self.samples += len(batch)
            self.bytes += batch.nbytes


def _first_values(batch: Any) -> int:
    """The sum of the first value of each sample."""
    if isinstance(batch, tuple):
        return int(batch[0].numpy()[batch[1].numpy()[:-1]].astype(int).sum())
    return int(batch.numpy().reshape(len(batch), -1)[:, 0].astype(int).sum())


class Passes:
    """Epochs, one after another; a timed run continues where the last one stopped. The clock of an epoch starts when
    each of the `workers` has delivered its first batch, since they make these at the same time."""

    def __init__(self, batches: Batches, workers: int = 0) -> None:
        self._batches, self._first = batches, max(1, workers)
        self._at: Iterator[Any] | None = None

    def run(self, seconds: float, watched: tuple[int, ...]) -> dict[str, float]:
        """Rates over `seconds` of batches, without the first ones of each epoch; CPU time over all batches."""
        pids = [*family(os.getpid()), *watched]
        busy, began, spent = cpu_s(pids), _now(), 0.0
        timed, all_of_it = Seen(), Seen()
        while spent < seconds and _now() - began < WALL_FACTOR * seconds:
            if self._at is None:
                self._at = iter(self._batches)
                for batch in itertools.islice(self._at, self._first):
                    all_of_it.add(batch)
                pids = [*family(os.getpid()), *watched]
            started = _now()
            for batch in self._at:
                timed.add(batch)
                if spent + _now() - started >= seconds:
                    break
            else:
                self._at = None
            spent += _now() - started
        used = cpu_s(pids) - busy
        read = timed.bytes + all_of_it.bytes
        return {
            "samples_s": timed.samples / spent,
            "bytes_s": timed.bytes / spent,
            "cpu_s_gb": used / read * 1e9,
        }

    def memory(self, batches: int) -> int:
        """Peak of anonymous memory and page tables, in bytes, at a few points of one more epoch."""
        peak_bytes, points = 0, {batches * point // MEMORY_POINTS for point in range(MEMORY_POINTS)}
        self._at = None
        deadline = _now() + MEMORY_S
        for number, _ in enumerate(self._batches):
            if number in points or _now() > deadline:
                peak_bytes = max(peak_bytes, anonymous_bytes(family(os.getpid())))
            if _now() > deadline:
                break
        return peak_bytes


def _warm(peer: Peer, job: Job) -> dict[str, Any]:
    """Time to the first batch, then runs, then memory."""
    if job.kind == "images":
        # Even with more cores, the trainer beside its workers must not have more cores than the decoder alone.
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: job.workers])
    began = _now()
    batches = peer.batches(job)
    next(iter(batches))
    first_s = _now() - began
    passes = Passes(batches, job.workers)
    passes.run(job.seconds / 2, job.watched)  # untimed: maps pages, grows allocators
    runs = [passes.run(job.seconds, job.watched) for _ in range(job.runs)]
    memory = passes.memory(job.samples // job.batch_size)
    return {"first_s": first_s, "runs": runs, "memory_bytes": memory, **_ledger(batches, job)}


def _dropped(peer: Peer, job: Job) -> dict[str, Any]:
    """Drop the page cache, then time one run. In a process of its own, since pages that are mapped cannot be dropped."""
    drop_page_cache(path for path in Path(job.disk).rglob("*") if path.is_file())
    return {"run": Passes(peer.batches(job), job.workers).run(job.seconds, job.watched)}


def _ledger(batches: Batches, job: Job) -> dict[str, Any]:
    """{"exact": True} when one epoch holds each sample once, as far as a count and a sum can tell; {} if not asked."""
    if not job.thorough:
        return {}
    seen, total = Seen(), 0
    for batch in batches:
        seen.add(batch)
        total += _first_values(batch)
    return {"exact": seen.samples == job.samples and total == corpus.first_bytes(job)}


def _cold(peer: Peer, job: Job) -> dict[str, Any]:
    """Time one whole epoch, opening included."""
    settle()
    began, first_s, seen = _now(), 0.0, Seen()
    for batch in peer.batches(job):
        first_s = first_s or _now() - began
        seen.add(batch)
    return {"first_s": first_s, "epoch_s": _now() - began, "samples": seen.samples}


def main() -> None:
    """Run the jobs on the command line. `write` takes several jobs of one peer, so that it imports once."""
    mode, jobs = sys.argv[1], [Job.parsed(text) for text in sys.argv[2:]]
    peer: Peer = importlib.import_module(f"bench.peers.{MODULES[jobs[0].peer]}")
    does: dict[str, Callable[[Peer, Job], Any]] = {
        "write": lambda peer, job: peer.write(job),
        "warm": _warm,
        "cold": _cold,
        "dropped": _dropped,
    }
    for job in jobs:
        print("\n" + json.dumps(does[mode](peer, job) or {}), flush=True)


if __name__ == "__main__":
    main()
