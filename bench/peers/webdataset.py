"""WebDataset: tar shards, read in sequence, shuffled in a buffer.

Set up as its guide says: shards in a shuffled order, a sample buffer of 1,000, batches made inside the pipeline (so in
the workers) and a WebLoader with batch_size=None; persistent workers. The cold run reads each shard through `pipe:`
and a copier that writes to standard output.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import webdataset as wds

from bench.peers import collate, corpus, tars
from bench.peers.fetched import s5cmd_path
from bench.peers.peer import Batches, Job

BUFFER = 1000


def write(job: Job) -> None:
    """Write every kind as tars, one member per sample."""
    tars.write(job)


def batches(job: Job) -> Batches:
    """Read the shards, whose names come from the local folder, since WebDataset does not list S3."""
    names = sorted(path.name for path in Path(job.folder).glob("*.tar"))
    urls = [str(Path(job.folder, name)) for name in names]
    if job.remote:
        urls = [f"pipe:{s5cmd_path()} --endpoint-url {job.endpoint} cat {job.remote}{name}" for name in names]
    collate_fn = collate.collate_of(job)
    dtype = corpus.DTYPE.get(job.kind)

    def value(sample: dict[str, Any]) -> Any:
        return sample["bin"] if dtype is None else np.frombuffer(sample["bin"], dtype)

    data = (
        wds.WebDataset(urls, shardshuffle=len(urls), empty_check=False)
        .shuffle(BUFFER)
        .map(value)
        .batched(job.batch_size, collation_fn=collate_fn, partial=True)
    )
    more: dict[str, Any] = {"persistent_workers": True, "prefetch_factor": 4} if job.workers else {}
    return wds.WebLoader(data, batch_size=None, num_workers=job.workers, collate_fn=_as_is, **more)


def _as_is(batch: Any) -> Any:
    """Return the batch unchanged; the default would collate it again."""
    return batch
