"""The rows that every reader gets: a text of about 500 bytes and a label, written in each format by its own writer."""

from __future__ import annotations

import csv
import importlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

SHARDS = 4
CLASSES = 10
MEAN_BYTES = 500
_WORDS = (
    "the",
    "cache",
    "keeps",
    "extents",
    "of",
    "training",
    "data",
    "where",
    "they",
    "are",
    "read",
    "naïve",
    '"so"',
)
Row = dict[str, Any]


def rows(count: int) -> Iterator[Row]:
    """Yield {"text": str, "label": int}."""
    draw = np.random.default_rng(40)
    words = draw.choice(_WORDS, 20_000)
    long = " ".join(words)
    starts = draw.integers(0, len(long) - 2 * MEAN_BYTES, count).tolist()
    sizes = draw.integers(MEAN_BYTES // 2, MEAN_BYTES * 3 // 2, count).tolist()
    for number, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        yield {"text": f"{number} {long[start : start + size]}", "label": number % CLASSES}


def _parts(count: int) -> Iterator[list[Row]]:
    every = list(rows(count))
    for shard in range(SHARDS):
        yield every[shard::SHARDS]


def write_jsonl(folder: Path, count: int) -> None:
    """Write one object a line."""
    for shard, part in enumerate(_parts(count)):
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in part)
        (folder / f"{shard}.jsonl").write_text("".join(lines))


def write_csv(folder: Path, count: int) -> None:
    """Write a header and quoted cells."""
    for shard, part in enumerate(_parts(count)):
        with open(folder / f"{shard}.csv", "w", newline="") as file:
            out = csv.DictWriter(file, ["text", "label"])
            out.writeheader()
            out.writerows(part)


def write_parquet(folder: Path, count: int) -> None:
    """Write by pyarrow, at its defaults."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for shard, part in enumerate(_parts(count)):
        pq.write_table(pa.Table.from_pylist(part), folder / f"{shard}.parquet")


def write_arrow(folder: Path, count: int) -> None:
    """Write by `save_to_disk` of Hugging Face `datasets`."""
    import datasets

    made = datasets.Dataset.from_list(list(rows(count)))
    made.save_to_disk(str(folder / "saved"), num_shards=SHARDS)


def write_mds(folder: Path, count: int) -> None:
    """Write by MosaicML Streaming, in shards of its default size."""
    mosaic = importlib.import_module(
        "bench.peers.mosaic"
    )  # declares operators that the import of Streaming needs
    with mosaic.MDSWriter(out=str(folder), columns={"text": "str", "label": "int"}) as out:
        for row in rows(count):
            out.write(row)


def write_litdata(folder: Path, count: int) -> None:
    """Write by litData's `optimize` in one process."""
    os.environ["LITDATA_DISABLE_VERSION_CHECK"] = "1"
    from litdata import optimize

    optimize(
        rows, [count], str(folder), num_workers=1, chunk_bytes=64_000_000, start_method="fork", verbose=False
    )


def write_tfrecord(folder: Path, count: int) -> None:
    """Write by the `tfrecord` package, each file with its index."""
    from tfrecord import TFRecordWriter
    from tfrecord.tools.tfrecord2idx import create_index

    for shard, part in enumerate(_parts(count)):
        path = folder / f"{shard}.tfrecord"
        out = TFRecordWriter(str(path))
        for row in part:
            out.write({"text": (row["text"].encode(), "byte"), "label": (row["label"], "int")})
        out.close()
        create_index(str(path), str(path.with_suffix(".index")))


def write_tar_gz(folder: Path, count: int) -> None:
    """Write by WebDataset's TarWriter, a text and a class for each sample."""
    from webdataset import TarWriter

    for shard, part in enumerate(_parts(count)):
        with TarWriter(str(folder / f"{shard}.tar.gz")) as out:
            for number, row in enumerate(part):
                out.write({"__key__": f"{shard}-{number:06}", "txt": row["text"], "cls": row["label"]})


WRITERS: dict[str, Callable[[Path, int], None]] = {
    "jsonl": write_jsonl,
    "csv": write_csv,
    "arrow": write_arrow,
    "parquet": write_parquet,
    "mds": write_mds,
    "litdata": write_litdata,
    "tfrecord": write_tfrecord,
    "tar.gz": write_tar_gz,
}
