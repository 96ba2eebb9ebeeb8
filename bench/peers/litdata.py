"""litData: StreamingDataset and StreamingDataLoader over `optimize`d chunks.

Set up as its guide says: chunks of 64 MB; tokens with TokensLoader (chunks of whole sequences), the other kinds with
the default loader, samples as arrays or bytes; persistent workers. `batch_decode` is the setting that was faster here.
The cold run reads from S3 into an empty cache folder.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

os.environ["LITDATA_DISABLE_VERSION_CHECK"] = "1"  # else it queries PyPI at import and at every opening

from litdata import StreamingDataLoader, StreamingDataset, TokensLoader, optimize
from litdata.streaming import downloader

from bench.peers import collate, corpus
from bench.peers.corpus import SEQ_LEN
from bench.peers.peer import Batches, Job

CHUNK_BYTES = 64_000_000
CHUNK_SEQUENCES = CHUNK_BYTES // (2 * SEQ_LEN)


def write(job: Job) -> None:
    """Convert the corpus in one process, since it is small."""
    more: dict[str, Any] = {"chunk_bytes": CHUNK_BYTES}
    if job.kind == "tokens":
        more = {"chunk_size": CHUNK_SEQUENCES * SEQ_LEN, "item_loader": TokensLoader()}
    optimize(_Made(job), [0], job.folder, num_workers=1, start_method="fork", verbose=False, **more)


class _Made:
    """Callable that `optimize` calls for each of its inputs; there is one."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def __call__(self, _: int) -> Iterator[Any]:
        job = self._job
        if job.kind == "tokens":
            flat = corpus.fixed(job.corpus, job.kind)
            for start in range(0, len(flat), CHUNK_SEQUENCES):
                yield torch.from_numpy(np.array(flat[start : start + CHUNK_SEQUENCES]).reshape(-1))
            return
        for sample in corpus.each(job):
            yield np.array(sample) if job.kind in corpus.DTYPE else sample.tobytes()


def _stacked(samples: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack(list(samples))


def _decoded_together(job: Job) -> int | str:
    """Value of `batch_decode`. The default decodes 256 neighbours at once. That is good for small samples in one
    process, and bad for large samples and for workers, since each decodes the same neighbours."""
    return 1 if job.kind in ("blobs", "images") or job.workers else "auto"


def batches(job: Job) -> Batches:
    """Open the dataset; only a cold run names a cache folder."""
    torch.set_num_threads(1)
    where: dict[str, Any] = {"input_dir": job.folder}
    if job.remote:
        # litData has no option for an endpoint without TLS, which it refuses by default.
        downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True
        where = {
            "input_dir": job.remote,
            "cache_dir": str(Path(job.cache)),
            "storage_options": {"endpoint_url": job.endpoint},
        }
    loader = {"item_loader": TokensLoader(block_size=SEQ_LEN)} if job.kind == "tokens" else {}
    data = StreamingDataset(
        **where, shuffle=True, drop_last=False, batch_decode=_decoded_together(job), **loader
    )
    return StreamingDataLoader(
        data,
        batch_size=job.batch_size,
        num_workers=job.workers,
        persistent_workers=job.workers > 0,
        collate_fn=_stacked if job.kind == "tokens" else collate.collate_of(job),
    )
