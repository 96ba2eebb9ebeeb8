"""Our loader as a plug-in of DLIO: `workload.reader.data_loader_classname=dlio_loader.CachedDataLoader`.

It reads the `.npz` files below `DLIO_URI/train/` that DLIO made, each in its place a sample, as DLIO's own reader does: the
array is decoded, and DLIO's array of the size that a model takes stands for it.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from dlio_benchmark.common.enumerations import DataLoaderType
from dlio_benchmark.data_loader.base_data_loader import BaseDataLoader

from loader import DataLoader, open_dataset


def _sample(resized: Any, body: bytes) -> Any:
    assert np.load(io.BytesIO(body), allow_pickle=True)["x"][..., 0].nbytes > 0
    return resized


class CachedDataLoader(BaseDataLoader):
    """Reads through the daemon of this node."""

    def __init__(self, format_type: Any, dataset_type: Any, epoch_number: int) -> None:
        super().__init__(format_type, dataset_type, epoch_number, DataLoaderType.PYTORCH)

    def read(self) -> None:
        """Open the dataset."""
        args = self._args
        files = open_dataset(
            f"{os.environ['DLIO_URI']}/train/",
            format="files",
            decode=None,
            transform=partial(_sample, args.resized_image),
        )
        self._batches = DataLoader(
            files,
            batch_size=self.batch_size,
            shuffle=True,
            num_workers=args.read_threads,
            persistent_workers=args.read_threads > 0,
            drop_last=True,
            rank=args.my_rank,
            world_size=args.comm_size,
        )

    def next(self) -> Iterator[Any]:
        """Yield the batches of an epoch."""
        super().next()
        yield from self._batches

    def finalize(self) -> None:
        """Do nothing: workers end with the process."""
