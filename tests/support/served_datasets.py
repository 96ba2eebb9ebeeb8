"""Datasets of one extent, as the daemon serves them."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

from cachesvc.core.model import DatasetId, ExtentId
from cachesvc.daemon.datasets import (
    SealedCatalog,
    ServedDataset,
)


def dataset(number: int) -> ServedDataset:
    extent = ExtentId(number.to_bytes(16, "big"))
    catalog: Any = SimpleNamespace(uri="s3://b/", samples=1, layout=None, compressed=False, format="files")
    sealed = SealedCatalog(os.open("/dev/null", os.O_RDONLY))
    name = DatasetId(f"{number:032x}")
    return ServedDataset(name, catalog, sealed, (extent,), (10,), ((extent, 10),), {extent: 0}, frozenset())
