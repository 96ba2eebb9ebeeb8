"""Folders of many kinds, and the errors and notes of opening them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cachesvc.catalog.catalog import Catalog
from cachesvc.catalog.options import Options
from cachesvc.core.errors import InvalidInput, NotFound
from tests.support.catalog_reader import compiled
from tests.support.datasets import tar_bytes, write_files

TAR = tar_bytes({"k": {"jpg": b"1"}})
IMAGES = {f"{kind}/{n}.jpg": bytes([n]) for kind in ("cat", "dog") for n in range(5)}
BIG = bytes((1 << 20) + 1)
HDF5 = b"\x89HDF\r\n\x1a\n" + bytes(100)


def opened(folder: Path, files: Mapping[str, bytes], **options: object) -> Catalog:
    write_files(folder, files)
    return compiled(folder, Options(**options))  # type: ignore[arg-type]


def refusal(folder: Path, files: Mapping[str, bytes] = {}, **options: object) -> str:
    with pytest.raises((InvalidInput, NotFound)) as caught:
        opened(folder, files, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def left_out(catalog: Catalog) -> tuple[int, int, str]:
    """(count left out, count listed, name of the first) from the single note on left-out objects."""
    (note,) = [note for note in catalog.notes if "left out" in note]
    count, _, listed = note.split()[:3]
    assert f"objects are no {catalog.format} and were left out, the first is " in note
    return int(count), int(listed), note.rpartition("/")[2]


def parquet(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"a": [1, 2]}), path)
