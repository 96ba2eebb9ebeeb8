"""`python -m bench.prepared_jobs WAY FOLDER WORKERS EPOCHS`: read whole epochs as a training job does, and print the time.

WAY is `prepared`, `plain` (our loader, which decodes each time), `torch` (torch's DataLoader over the same files),
`streaming` (MosaicML Streaming over MDS shards of the same JPEGs), or `ffcv` (FFCV over pictures that were resized when its
file was written). The last two with `-write` convert the files of FOLDER into the folder WORKERS.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

SIDE, BATCH = 256, 64


def resized(image: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return a picture of 256 x 256, uint8[256, 256, 3]."""
    if path := os.environ.get("CALLS"):
        with open(path, "a") as file:
            file.write(".")
    picture = image if isinstance(image, Image.Image) else Image.fromarray(np.asarray(image))
    return np.asarray(picture.resize((SIDE, SIDE), Image.Resampling.BILINEAR))


def resized_file(file: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Decode and resize a file, as a job without preparing does."""
    with Image.open(file) as image:
        return resized(image.convert("RGB"))


class Files:
    """The pictures of a folder, as a user's own dataset for torch's DataLoader."""

    def __init__(self, folder: str) -> None:
        self.paths = sorted(map(str, Path(folder).iterdir()))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, number: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return resized_file(self.paths[number])


def ours(way: str, folder: str, workers: int) -> Iterable[Any]:
    """Return the batches of our loader."""
    from bench.prepared_jobs import resized  # not of __main__, so that all jobs agree about its name
    from cachesvc.torch import DataLoader, open_dataset

    given = {"prepare" if way == "prepared" else "transform": resized}
    return DataLoader(open_dataset(folder, **given), BATCH, shuffle=True, num_workers=workers)  # type: ignore[arg-type]


def torchs(_: str, folder: str, workers: int) -> Iterable[Any]:
    """Return the batches of torch's DataLoader."""
    import torch
    from torch.utils.data import DataLoader

    torch.set_num_threads(1)
    data: Any = Files(folder)
    return DataLoader(data, BATCH, shuffle=True, num_workers=workers, prefetch_factor=4)


def streaming(_: str, folder: str, workers: int) -> Iterable[Any]:
    """Return the batches of MosaicML Streaming."""
    import torch

    mosaic: Any = importlib.import_module("bench.peers.mosaic")

    class Pictures(mosaic.StreamingDataset):
        def __getitem__(self, number: int) -> Any:
            return resized_file(io.BytesIO(super().__getitem__(number)["x"]))

    torch.set_num_threads(1)
    mosaic.clean_stale_shared_memory()
    data = Pictures(local=folder, shuffle=True, batch_size=BATCH)
    found: Iterable[Any] = mosaic.StreamingDataLoader(data, batch_size=BATCH, num_workers=workers)
    return found


def streaming_write(folder: str, into: str) -> None:
    """Write MDS shards of the encoded pictures."""
    mosaic: Any = importlib.import_module("bench.peers.mosaic")
    with mosaic.MDSWriter(out=into, columns={"x": "bytes"}, size_limit=mosaic.SHARD_BYTES) as writer:
        for path in sorted(Path(folder).iterdir()):
            writer.write({"x": path.read_bytes()})


def ffcv(_: str, folder: str, workers: int) -> Iterable[Any]:
    """Return the batches of FFCV, shuffled as it does in RAM."""
    from ffcv.fields.basics import IntDecoder  # type: ignore[import-not-found]
    from ffcv.fields.ndarray import NDArrayDecoder  # type: ignore[import-not-found]
    from ffcv.loader import Loader, OrderOption  # type: ignore[import-not-found]

    pipelines = {"x": [NDArrayDecoder()], "n": [IntDecoder()]}
    order, path = OrderOption.RANDOM, f"{folder}/x.beton"
    loader = Loader(path, BATCH, num_workers=workers, order=order, os_cache=True, pipelines=pipelines)
    return (batch[0] for batch in loader)


def ffcv_write(folder: str, into: str) -> None:
    """Write FFCV's file, for which pictures are resized."""
    from ffcv.fields import IntField, NDArrayField  # type: ignore[import-not-found]
    from ffcv.writer import DatasetWriter  # type: ignore[import-not-found]

    class Numbered(Files):
        def __getitem__(self, number: int) -> Any:
            return super().__getitem__(number), number

    fields = {"x": NDArrayField(np.dtype(np.uint8), (SIDE, SIDE, 3)), "n": IntField()}
    DatasetWriter(f"{into}/x.beton", fields, num_workers=2).from_indexed_dataset(Numbered(folder))


def main(way: str, folder: str, workers: str, epochs: str = "1") -> None:
    """Convert the pictures, or read them and print what their epochs took, as JSON."""
    writers: dict[str, Callable[[str, str], None]] = {
        "streaming-write": streaming_write,
        "ffcv-write": ffcv_write,
    }
    if way in writers:
        writers[way](folder, workers)
        return
    loaders = {"torch": torchs, "streaming": streaming, "ffcv": ffcv}
    batches = loaders.get(way, ours)(way, folder, int(workers))
    begun, cpu = time.monotonic(), time.process_time()
    count = sum(len(batch) for _ in range(int(epochs)) for batch in batches)
    row = {"begun": begun, "ended": time.monotonic(), "cpu_s": time.process_time() - cpu, "samples": count}
    print("\n" + json.dumps(row), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
