"""Samples of any kind as WebDataset shards: one `.bin` member per sample.

Shards have at most about 32 MB, and their number is even, so that two workers read equal shares.
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
    """Write shards `00000.tar`, `00001.tar`, ... into `job.folder`."""
    pairs = -(-corpus.size_bytes(Path(job.corpus), job.kind) // (2 * SHARD_BYTES))
    samples = enumerate(corpus.each(job))
    for shard in range(2 * pairs):
        count = job.samples * (shard + 1) // (2 * pairs) - job.samples * shard // (2 * pairs)
        with tarfile.open(Path(job.folder, f"{shard:05d}.tar"), "w") as tar:
            for number, sample in itertools.islice(samples, count):
                entry = tarfile.TarInfo(f"{number:08d}.bin")
                entry.size = sample.nbytes
                tar.addfile(entry, io.BytesIO(sample.tobytes()))
