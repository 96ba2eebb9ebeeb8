"""Cuts a dataset into shards, and writes the files of one shard: Megatron's `.bin`, and `.idx` with the documents.

The format: https://github.com/NVIDIA/Megatron-LM/blob/core_r0.8.0/megatron/core/datasets/indexed_dataset.py
A shard is complete once its `.idx` has its name.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from cachesvc.core.errors import CacheError, OutOfSpace
from loader.datasets.dataset import Dataset
from loader.token_shards.tokenizer import Tokenizer, text_of

UNFINISHED = ".tmp"
"""Ends the names of files that are not complete."""
_HEAD = struct.Struct("<9sQBQQ")
_MAGIC = b"MMIDIDX\x00\x00"
_CODES = {"<u2": 8, "<i4": 4}
_ROWS = 64
"""Rows that are tokenised together: enough to make the call cheap, few enough for long documents."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Rows [first, last) of a dataset, of about `size_bytes`, and the path of its files without `.bin` or `.idx`."""

    first: int
    last: int
    size_bytes: int
    stem: str

    @property
    def is_complete(self) -> bool:
        """Whether both files are there."""
        return os.path.exists(f"{self.stem}.idx")


def shards_of(dataset: Dataset, folder: str, shard_bytes: int) -> list[Shard]:
    """Cut a dataset into shards of about `shard_bytes` of stored data: at the same rows in each run."""
    catalog = dataset.catalog
    ends = np.concatenate(([0], np.cumsum(catalog.extent_sizes)))
    count = max(1, round(int(ends[-1]) / shard_bytes))
    rows = np.interp(np.linspace(0, ends[-1], count + 1), ends, catalog.extent_first)
    first = np.unique(rows.round().astype(np.int64))
    size_bytes = np.diff(np.interp(first, catalog.extent_first, ends)).astype(np.int64).tolist()
    return [
        Shard(low, high, size, os.path.join(folder, f"tokens-{at:05d}-of-{len(first) - 1:05d}"))
        for at, (low, high, size) in enumerate(
            zip(first[:-1].tolist(), first[1:].tolist(), size_bytes, strict=True)
        )
    ]


def write_shard(
    shard: Shard, dataset: Dataset, tokenizer: Tokenizer, progress: Callable[[int], None]
) -> None:
    """Tokenise the rows of a shard into its files; call `progress` with the bytes done since the last call. Memory is
    that of some rows, and 8 bytes for each document. Raises the errors of reading, InvalidInput for a row without text,
    and OutOfSpace where the files cannot be written."""
    done_bytes, lengths, tokens_path = 0, list[int](), f"{shard.stem}.bin{UNFINISHED}"
    try:
        with open(tokens_path, "wb") as file:
            for first in range(shard.first, shard.last, _ROWS):
                last = min(first + _ROWS, shard.last)
                documents = tokenizer.documents(_texts(dataset, first, last))
                lengths += _append(file, documents, tokenizer)
                now_bytes = shard.size_bytes * (last - shard.first) // (shard.last - shard.first)
                progress(now_bytes - done_bytes)
                done_bytes = now_bytes
            _finish(file)
        index_path = f"{shard.stem}.idx{UNFINISHED}"
        with open(index_path, "wb") as file:
            file.write(_index(lengths, tokenizer.dtype))
            _finish(file)
        os.replace(tokens_path, f"{shard.stem}.bin")
        os.replace(index_path, f"{shard.stem}.idx")
    except CacheError:  # some are OSErrors as well
        raise
    except OSError as error:
        raise OutOfSpace(f"{shard.stem} cannot be written: {error.strerror or error}") from error


def _texts(dataset: Dataset, first: int, last: int) -> list[str]:
    rows = range(first, last)
    samples = dataset.iter_samples(np.arange(first, last, dtype=np.int64), dataset.rng_key)
    return [
        text_of(sample, f"row {row} of {dataset.catalog.uri}")
        for row, sample in zip(rows, samples, strict=True)
    ]


def _append(file: BinaryIO, documents: Sequence[Sequence[int]], tokenizer: Tokenizer) -> list[int]:
    """Write documents, and return the lengths of those that are not empty."""
    for document in documents:
        file.write(np.asarray(document, tokenizer.dtype).tobytes())
    return [len(document) for document in documents if document]


def _index(lengths: Sequence[int], dtype: np.dtype[np.generic]) -> bytes:
    sizes = np.asarray(lengths, "<i4")
    starts = np.concatenate(([0], np.cumsum(sizes, dtype="<i8")))[:-1] * dtype.itemsize
    head = _HEAD.pack(_MAGIC, 1, _CODES[dtype.str], len(sizes), len(sizes) + 1)
    return (
        head
        + sizes.tobytes()
        + starts.astype("<i8").tobytes()
        + np.arange(len(sizes) + 1, dtype="<i8").tobytes()
    )


def _finish(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
