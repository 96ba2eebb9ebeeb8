"""Readers of rows, shuffled, in batches of 64 by torch's default collation: ours, and those of other projects."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

BATCH = 64
Batches = Iterable[Any]
"""Iterated once an epoch; a batch is a dict with "text" and "label", or in tars of members "txt" and "cls"."""
EXTENSION = {"csv": "*.csv", "jsonl": "*.jsonl", "parquet": "*.parquet"}


def ours(format: str, folder: Path, workers: int) -> Batches:
    """This project's loader, through the daemon that `CACHESVC_SOCKET` names."""
    from loader import DataLoader, open_dataset

    return DataLoader(
        open_dataset(folder), BATCH, shuffle=True, num_workers=workers, persistent_workers=workers > 0
    )


def hugging_face(format: str, folder: Path, workers: int) -> Batches:
    """Hugging Face `datasets`, which converts text to Arrow once, and maps it; it fetches a batch at a time."""
    import datasets

    if format == "arrow":
        data = datasets.load_from_disk(str(folder / "saved"))
    else:
        files = sorted(map(str, folder.glob(EXTENSION[format])))
        kind = "json" if format == "jsonl" else format
        data = datasets.load_dataset(kind, data_files=files, split="train", cache_dir=str(folder / ".hf"))
    return _torch_loader(data, workers)


class _Table:
    """A table of pyarrow in memory, which is read a batch at a time."""

    def __init__(self, table: Any) -> None:
        self._table = table

    def __len__(self) -> int:
        return len(self._table)

    def __getitems__(self, indices: list[int]) -> list[Any]:
        rows: list[Any] = self._table.take(indices).to_pylist()
        return rows


def by_pyarrow(format: str, folder: Path, workers: int) -> Batches:
    """Read by hand-written pyarrow: all rows are one table, and each batch is a `take`."""
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.json
    import pyarrow.parquet

    pa.set_cpu_count(1)
    reads = {
        "csv": pyarrow.csv.read_csv,
        "jsonl": pyarrow.json.read_json,
        "parquet": pyarrow.parquet.read_table,
        "arrow": lambda path: pa.ipc.open_stream(path).read_all(),
    }
    files = sorted(folder.glob(EXTENSION.get(format, "saved/*.arrow")))
    table = pa.concat_tables([reads[format](str(path)) for path in files]).combine_chunks()
    return _torch_loader(_Table(table), workers)


class _Frame:
    """A frame of polars in memory, which is read a batch at a time."""

    def __init__(self, frame: Any) -> None:
        self._frame = frame

    def __len__(self) -> int:
        return len(self._frame)

    def __getitems__(self, indices: list[int]) -> list[Any]:
        rows: list[Any] = self._frame[indices].to_dicts()
        return rows


def by_polars(format: str, folder: Path, workers: int) -> Batches:
    """The same by polars."""
    import polars

    reads = {"csv": polars.read_csv, "jsonl": polars.read_ndjson, "parquet": polars.read_parquet}
    files = sorted(folder.glob(EXTENSION.get(format, "saved/*.arrow")))
    read = reads.get(format, polars.read_ipc_stream)
    return _torch_loader(_Frame(polars.concat([read(path) for path in files], rechunk=True)), workers)


def _torch_loader(data: Any, workers: int) -> Batches:
    from torch.utils.data import DataLoader

    # polars has threads, which a fork would not survive
    context = "spawn" if workers and isinstance(data, _Frame) else None
    return DataLoader(
        data,
        BATCH,
        shuffle=True,
        num_workers=workers,
        persistent_workers=workers > 0,
        multiprocessing_context=context,
    )


def streaming(format: str, folder: Path, workers: int) -> Batches:
    """MosaicML Streaming, as its guide says."""
    mosaic = importlib.import_module(
        "bench.peers.mosaic"
    )  # declares operators that the import of Streaming needs
    mosaic.clean_stale_shared_memory()
    data = mosaic.StreamingDataset(local=str(folder), shuffle=True, batch_size=BATCH)
    loader: Batches = mosaic.StreamingDataLoader(
        data, batch_size=BATCH, num_workers=workers, persistent_workers=workers > 0
    )
    return loader


def litdata(format: str, folder: Path, workers: int) -> Batches:
    """litData, as its guide says."""
    os.environ["LITDATA_DISABLE_VERSION_CHECK"] = "1"
    from litdata import StreamingDataLoader, StreamingDataset

    data = StreamingDataset(str(folder), shuffle=True, drop_last=False)
    return StreamingDataLoader(data, batch_size=BATCH, num_workers=workers, persistent_workers=workers > 0)


def tfrecord(format: str, folder: Path, workers: int) -> Batches:
    """The `tfrecord` package, each file with its index and shuffled in a queue."""
    import torch
    from tfrecord.torch.dataset import MultiTFRecordDataset

    names = [path.stem for path in sorted(folder.glob("*.tfrecord"))]
    data = MultiTFRecordDataset(
        str(folder / "{}.tfrecord"),
        str(folder / "{}.index"),
        {name: 1 / len(names) for name in names},
        {"text": "byte", "label": "int"},
        shuffle_queue_size=1024,
        transform=_example,
        infinite=False,
    )
    return torch.utils.data.DataLoader(data, BATCH, num_workers=workers, persistent_workers=workers > 0)


def webdataset(format: str, folder: Path, workers: int) -> Batches:
    """WebDataset, as its guide says: shards in a shuffled order, a sample buffer of 1,000, batches made in the workers."""
    import webdataset as wds

    shards = sorted(map(str, folder.glob("*.tar.gz")))
    data = wds.WebDataset(shards, shardshuffle=len(shards), empty_check=False).shuffle(1000).decode()
    loader: Batches = wds.WebLoader(
        data.to_tuple("txt", "cls").batched(BATCH, partial=True),
        batch_size=None,
        num_workers=workers,
        persistent_workers=workers > 0,
    )
    return loader


def _example(row: dict[str, Any]) -> dict[str, Any]:
    return {"text": bytes(row["text"]), "label": int(row["label"][0])}


OURS = "cachesvc"
READERS: dict[str, Callable[[str, Path, int], Batches]] = {
    OURS: ours,
    "datasets": hugging_face,
    "pyarrow by hand": by_pyarrow,
    "polars by hand": by_polars,
    "MosaicML Streaming": streaming,
    "litData": litdata,
    "tfrecord": tfrecord,
    "WebDataset": webdataset,
}
TABLES = ("datasets", "pyarrow by hand", "polars by hand")
OTHERS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("jsonl", "csv", "arrow", "parquet"), TABLES),
    "mds": ("MosaicML Streaming",),
    "litdata": ("litData",),
    "tfrecord": ("tfrecord",),
    "tar.gz": ("WebDataset",),
}
"""The readers that each format is compared with."""


def rows_in(batch: Any) -> int:
    """Return the number of rows of a batch."""
    if isinstance(batch, dict):
        return len(batch["label"] if "label" in batch else batch["cls"])
    return len(batch[1])


def endless(batches: Batches) -> Iterator[int]:
    """Yield the number of rows of each batch, epoch after epoch."""
    while True:
        for batch in batches:
            yield rows_in(batch)
