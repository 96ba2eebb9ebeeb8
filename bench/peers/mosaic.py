"""MosaicML Streaming: StreamingDataset and StreamingDataLoader over MDS shards.

Set up as its guide says: shards of 64 MB (its default is 67 MB), uncompressed; `batch_size` given to the dataset too;
fixed-shape `ndarray` columns, which need no header per sample; the default shuffle (py1e); persistent workers; stale
shared memory of earlier runs removed first. The cold run gives both `remote` and `local`, and the default `predownload`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bench.peers import collate, corpus
from bench.peers.corpus import RECORD_BYTES, SEQ_LEN
from bench.peers.peer import Batches, Job


def _define_operators() -> None:
    """Declare torchvision's operators. None is called. Streaming imports torchvision, whose CUDA build fails to import
    beside a CPU build of torch unless they are declared."""
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _KEPT.append(library)


_KEPT: list[Any] = []
if torch.version.cuda is None:
    _define_operators()

from streaming import MDSWriter, StreamingDataLoader, StreamingDataset  # noqa: E402
from streaming.base.util import clean_stale_shared_memory  # noqa: E402

COLUMN = {"records": f"ndarray:uint8:{RECORD_BYTES}", "tokens": f"ndarray:uint16:{SEQ_LEN}"}
SHARD_BYTES = 64_000_000


def write(job: Job) -> None:
    """Write shards with one column, `x`."""
    with MDSWriter(
        out=job.folder, columns={"x": COLUMN.get(job.kind, "bytes")}, size_limit=SHARD_BYTES
    ) as writer:
        for sample in corpus.each(job):
            writer.write({"x": sample if job.kind in COLUMN else sample.tobytes()})


def batches(job: Job) -> Batches:
    """Open the shards, from S3 when `job.remote` is given."""
    clean_stale_shared_memory()
    if job.remote:
        os.environ["S3_ENDPOINT_URL"] = job.endpoint
        where = {"remote": job.remote, "local": job.cache}
    else:
        where = {"local": job.folder}
    data = StreamingDataset(**where, shuffle=True, batch_size=job.batch_size)
    return StreamingDataLoader(
        data,
        batch_size=job.batch_size,
        num_workers=job.workers,
        persistent_workers=job.workers > 0,
        collate_fn=_Column(collate.collate_of(job)),
    )


class _Column:
    """Collates the one column of the rows."""

    def __init__(self, collate_fn: Callable[[list[Any]], Any]) -> None:
        self._collate = collate_fn

    def __call__(self, rows: Sequence[dict[str, Any]]) -> Any:
        return self._collate([row["x"] for row in rows])
