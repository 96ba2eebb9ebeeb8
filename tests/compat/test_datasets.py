"""Files that Hugging Face's `datasets` writes, read by ours and by its own reader."""

from __future__ import annotations

import hashlib
import io
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from loader import DataLoader, open_dataset

datasets: Any = pytest.importorskip("datasets")


def written(rows: int, folder: Path) -> Any:
    """Make a dataset of each feature. Its fingerprint is given, since hashing one fails beside some releases of pyarrow."""
    chat = [{"role": datasets.Value("string"), "content": datasets.Value("string")}]
    kinds = datasets.Features(
        {
            "image": datasets.Image(),
            "label": datasets.ClassLabel(names=["cat", "dog"]),
            "text": datasets.Value("large_string"),
            "messages": chat,
            "pairs": datasets.Sequence({"a": datasets.Value("int32"), "b": datasets.Value("string")}),
            "grid": datasets.Array2D(shape=(2, 3), dtype="int32"),
            "ids": datasets.Sequence(datasets.Value("int64")),
            "many": datasets.Sequence(datasets.Image()),
            "when": datasets.Value("timestamp[us, tz=UTC]"),
            "score": datasets.Value("float32"),
            "call": datasets.Json(),
        }
    )
    path = str(folder / "rows.arrow")
    with datasets.arrow_writer.ArrowWriter(path=path, features=kinds) as writer:
        for n in range(rows):
            writer.write(kinds.encode_example(row(n)))
        writer.finalize()
    table = datasets.table.MemoryMappedTable.from_file(path)
    return datasets.Dataset(table, info=datasets.DatasetInfo(features=kinds), fingerprint="rows")


def row(n: int) -> dict[str, Any]:
    body = io.BytesIO()
    Image.fromarray(np.full((4, 4, 3), n % 256, np.uint8)).save(body, "PNG")
    image = {"bytes": body.getvalue(), "path": None}
    return {
        "image": image,
        "label": n % 2,
        "text": f"é{n}" if n % 5 else None,
        "messages": [{"role": "user", "content": f"c{n}"}] * (n % 3),
        "pairs": {"a": list(range(n % 3)), "b": [str(k) for k in range(n % 3)]},
        "grid": [[n] * 3] * 2,
        "ids": list(range(n % 4)),
        "many": [image] * (n % 2),
        "when": n * 1_000_001,
        "score": n / 8,
        "call": ({"name": "f", "arguments": {"x": [1, "y"]}}, [n, "z"], "text", None)[n % 4],
    }


def saved(made: Any, folder: Path) -> None:
    made.save_to_disk(str(folder), num_shards=2)


def as_parquet(made: Any, folder: Path) -> None:
    folder.mkdir()
    made.to_parquet(str(folder / "0.parquet"), batch_size=30)


WRITERS: dict[str, Callable[[Any, Path], None]] = {"save_to_disk": saved, "to_parquet": as_parquet}


def plain(value: Any) -> Any:
    """Return a value as both readers give it: pixels of pictures, lists of arrays."""
    if isinstance(value, Image.Image):
        return "pixels", np.asarray(value.convert("RGB")).tolist()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, list):
        return [plain(each) for each in value]
    return value.timestamp() if hasattr(value, "timestamp") else value


def digests(rows: Iterable[dict[str, Any]]) -> Counter[str]:
    return Counter(hashlib.sha256(repr(sorted(plain(each).items())).encode()).hexdigest() for each in rows)


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("workers", [0, 2])
def test_rows_are_those_of_its_own_reader(tmp_path: Path, writer: str, workers: int) -> None:
    made = written(100, tmp_path)
    WRITERS[writer](made, tmp_path / "d")
    found = open_dataset(tmp_path / "d", extent_bytes=1 << 14)
    assert found.classes == ("cat", "dog")
    seen: Counter[str] = Counter()
    for rank in (0, 1):
        batches = DataLoader(
            found, 10, shuffle=True, num_workers=workers, collate_fn=list, rank=rank, world_size=2
        )
        seen += digests(each for batch in batches for each in batch)
    assert seen == digests(made)


def keep(folder: str) -> None:
    """Write the small files that the tests without `datasets` read."""
    with tempfile.TemporaryDirectory() as scratch:
        for name, write in WRITERS.items():
            write(written(6, Path(scratch)), Path(folder) / name)
