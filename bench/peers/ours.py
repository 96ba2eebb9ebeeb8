"""This project's loader, through the daemon that `CACHESVC_SOCKET` names. Nothing is tuned. Beside the small RAM tier of
the runs from a disk the window is as much smaller: a quarter of it, as the default is of 1 GiB."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from bench.peers import pictures, tars
from bench.peers.corpus import DTYPE, RECORD_BYTES, ROW_BYTES, SEQ_LEN
from bench.peers.peer import Batches, Job
from loader import DataLoader, jagged, open_dataset

OPTIONS: dict[str, dict[str, Any]] = {
    "records": {"format": "records", "record_bytes": RECORD_BYTES},
    "tokens": {"format": "tokens", "dtype": "uint16", "seq_len": SEQ_LEN},
    "varied": {"format": "webdataset", "decode": None},
    "blobs": {"format": "webdataset", "decode": None},
    "images": {"format": "webdataset", "decode": pictures.decoded},
    "rows": {"format": "records", "record_bytes": ROW_BYTES},
}

DISK_WINDOW = 64 << 20


def write(job: Job) -> None:
    """Link the raw files as they are; write uneven samples into tars."""
    if job.kind in DTYPE:
        os.link(Path(job.corpus, f"{job.kind}.bin"), Path(job.folder, f"{job.kind}.bin"))
    else:
        tars.write(job)


def batches(job: Job) -> Batches:
    """Gather fixed samples into tensors, bytes into jagged tensors; pixels take the default collation."""
    data = open_dataset(job.remote, **OPTIONS[job.kind])
    more: dict[str, Any] = {}
    if job.kind not in (*DTYPE, "images"):
        more["collate_fn"] = jagged
    if job.threads:
        more["worker_type"] = "thread"
    if job.disk:
        more["window"] = DISK_WINDOW
    return DataLoader(
        data,
        job.batch_size,
        shuffle=True,
        num_workers=job.workers,
        persistent_workers=job.workers > 0 and not job.threads,
        **more,
    )
