"""Uneven samples (or any kind) as WebDataset shards: one `.bin` member a sample.

Shards are of 32 MB or a little less, and an even number of them, so that two workers have as much to read each.
"""

from __future__ import annotations

import io
import itertools
import tarfile
from pathlib import Path

from bench.peers import corpus
from bench.peers.peer import Job

SHARD_BYTES = 32_000_000


def write(job: Job) -> None:
    """Shards `00000.tar` and on in `job.folder`."""
    pairs = -(-corpus.size_bytes(Path(job.corpus), job.kind) // (2 * SHARD_BYTES))
    samples = enumerate(corpus.each(job))
    for shard in range(2 * pairs):
        count = job.samples * (shard + 1) // (2 * pairs) - job.samples * shard // (2 * pairs)
        with tarfile.open(Path(job.folder, f"{shard:05d}.tar"), "w") as tar:
            for number, sample in itertools.islice(samples, count):
                entry = tarfile.TarInfo(f"{number:08d}.bin")
                entry.size = sample.nbytes
                tar.addfile(entry, io.BytesIO(sample.tobytes()))
