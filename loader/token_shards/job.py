"""A job: from a dataset of text to a folder of shards."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from loader.datasets.dataset import open_dataset
from loader.token_shards.claim import claimed
from loader.token_shards.shards import shards_of
from loader.token_shards.tokenizer import Tokenizer
from loader.token_shards.workers import tokenised


@dataclass(frozen=True, slots=True)
class Job:
    """Options of one run. `format`, `split`, `field` and `eos` may be ""."""

    source: str
    folder: str
    tokenizer: str
    format: str
    split: str
    field: str
    eos: str
    on_error: Literal["raise", "skip"]
    processes: int
    shard_bytes: int


def write_shards(job: Job) -> Iterator[dict[str, Any]]:
    """Write the shards that the folder lacks; yield progress, then the result. Raises InvalidInput where the folder
    holds anything else, and the errors of reading and writing."""
    tokenizer = Tokenizer(job.tokenizer, job.eos)
    dataset = open_dataset(
        job.source,
        format=job.format or None,
        split=job.split or None,
        fields=job.field or None,
        labels="none",
        on_error=job.on_error,
    )
    shards = shards_of(dataset, job.folder, job.shard_bytes)
    total_bytes = sum(shard.size_bytes for shard in shards)
    made_of: dict[str, str | int] = {
        "dataset": dataset.version,
        "tokenizer": tokenizer.digest,
        "field": job.field,
        "number of shards": len(shards),
    }
    with claimed(job.folder, made_of):
        missing = [shard for shard in shards if not shard.is_complete]
        kept_bytes = total_bytes - sum(shard.size_bytes for shard in missing)
        for done_bytes in tokenised(dataset, tokenizer, missing, job.processes):
            yield {"done_bytes": kept_bytes + done_bytes, "total_bytes": total_bytes}
    size_bytes = sum(os.path.getsize(f"{shard.stem}.bin") for shard in shards)
    yield {
        "rows": len(dataset),
        "tokens": size_bytes // tokenizer.dtype.itemsize,
        "dtype": tokenizer.dtype.name,
        "shards": len(shards),
        "written_shards": len(missing),
        "size_bytes": size_bytes,
    }
