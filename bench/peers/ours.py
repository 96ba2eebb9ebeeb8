"""This project's loader, through the daemon that `CACHESVC_SOCKET` names. Nothing is tuned."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench.peers import collate, tars
from bench.peers.corpus import RECORD_BYTES, SEQ_LEN
from bench.peers.peer import Batches, Job
from loader import DataLoader, open_dataset

OPTIONS: dict[str, dict[str, Any]] = {
    "records": {"format": "records", "record_bytes": RECORD_BYTES},
    "tokens": {"format": "tokens", "dtype": "uint16", "seq_len": SEQ_LEN},
    "blobs": {"format": "webdataset", "decode": None},
}


def write(job: Job) -> None:
    """The raw files as they are; blobs in tars."""
    if job.kind == "blobs":
        tars.write(job)
    else:
        os.link(Path(job.corpus, f"{job.kind}.bin"), Path(job.folder, f"{job.kind}.bin"))


def batches(job: Job) -> Batches:
    """Fixed samples come as gathered tensors; blobs as bytes, collated as for everybody."""
    return _loader(job)


def halfway(job: Job) -> Callable[[], Iterator[Any]]:
    """state_dict in the middle, load_state_dict into a new loader."""
    before = _loader(job)
    before.skip(job.samples // job.batch_size // 2)
    state = before.state_dict()

    def go_on() -> Iterator[Any]:
        again = _loader(job)
        again.load_state_dict(state)
        return iter(again)

    return go_on


def can_thread() -> bool:
    """Whether the loader has workers that are threads."""
    return "worker_type" in inspect.signature(DataLoader).parameters


def _loader(job: Job) -> DataLoader:
    data = open_dataset(job.remote, **OPTIONS[job.kind])
    more: dict[str, Any] = {"collate_fn": collate.chosen(job)} if job.kind == "blobs" else {}
    if job.threads:
        more["worker_type"] = "thread"
    return DataLoader(
        data,
        job.batch_size,
        shuffle=True,
        num_workers=job.workers,
        persistent_workers=job.workers > 0 and not job.threads,
        **more,
    )
