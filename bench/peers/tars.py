"""The blobs (or any kind) as WebDataset shards: one `.bin` member a sample, about 32 MB a shard."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

from bench.peers import corpus
from bench.peers.peer import Job

SHARD_BYTES = 32_000_000


def write(job: Job) -> None:
    """Shards `00000.tar` and on in `job.folder`."""
    shard, written = -1, SHARD_BYTES
    tar: tarfile.TarFile | None = None
    for number, sample in enumerate(corpus.each(job)):
        if written >= SHARD_BYTES or tar is None:
            if tar is not None:
                tar.close()
            shard, written = shard + 1, 0
            tar = tarfile.open(Path(job.folder, f"{shard:05d}.tar"), "w")  # noqa: SIM115
        entry = tarfile.TarInfo(f"{number:08d}.bin")
        entry.size = sample.nbytes
        tar.addfile(entry, io.BytesIO(sample.tobytes()))
        written += sample.nbytes + 1024
    if tar is not None:
        tar.close()
