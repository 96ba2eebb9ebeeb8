"""A job: from a dataset of text to a folder of shards, in which no other run writes and whose shards are made of the same
data."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TextIO

from cachesvc.core.errors import InvalidInput, NotAllowed, OutOfSpace
from loader.datasets.dataset import open_dataset
from loader.token_shards.shards import UNFINISHED, shards_of
from loader.token_shards.tokenizer import Tokenizer
from loader.token_shards.workers import tokenised

MADE_OF = ".tokenize.json"
"""The file that says what the shards of a folder are made of. Hidden files are not data."""


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
    with _claimed(job.folder, made_of):
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


@contextmanager
def _claimed(folder: str, made_of: Mapping[str, str | int]) -> Iterator[None]:
    """Hold a folder, made where it does not exist, for shards made of `made_of`. Unfinished files are removed.

    Raises InvalidInput where the folder holds anything else or another run writes into it, NotAllowed and OutOfSpace.
    """
    with _opened(folder) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InvalidInput(f"another run writes into {folder}; wait for its end") from None
        _check(file, folder, made_of)
        for name in os.listdir(folder):
            if name.endswith(UNFINISHED):
                os.unlink(os.path.join(folder, name))
        yield


def _opened(folder: str) -> TextIO:
    path = os.path.join(folder, MADE_OF)
    try:
        os.makedirs(folder, exist_ok=True)
        others = sorted(os.listdir(folder))
        if others and MADE_OF not in others:
            raise InvalidInput(f"{folder} holds {others[0]}; name a folder that is empty or does not exist")
        return open(path, "a+")
    except PermissionError:
        raise NotAllowed(f"{folder} may not be written by this user") from None
    except (FileExistsError, NotADirectoryError):
        raise InvalidInput(f"{folder} is no folder; name one that is empty or does not exist") from None
    except OSError as error:
        raise OutOfSpace(f"{folder} cannot be written: {error.strerror or error}") from error


def _check(file: TextIO, folder: str, made_of: Mapping[str, str | int]) -> None:
    """Compare with what an earlier run noted, or note it."""
    file.seek(0)
    text = file.read()
    try:
        noted = json.loads(text) if text else None
    except ValueError:
        noted = None  # the run that noted it was killed
    if not isinstance(noted, dict):
        file.seek(0)
        file.truncate()
        json.dump(dict(made_of), file)
        file.flush()
        return
    differing = [name for name in made_of if noted.get(name) != made_of[name]]
    if differing:
        raise InvalidInput(f"{folder} holds shards of another {', '.join(differing)}; name another folder")
