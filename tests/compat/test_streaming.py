"""MDS as MosaicML Streaming writes it, in each of its compressions and with its hashes, and as it reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cachesvc.core.errors import CorruptData
from loader import DataLoader, open_dataset

streaming = pytest.importorskip("streaming", reason="no mosaicml-streaming here: `make compat` installs it")

COLUMNS = {"n": "int", "text": "str", "array": "ndarray:float32", "raw": "bytes", "row": "json"}
ROWS: list[dict[str, Any]] = [
    {
        "n": n,
        "text": f"ü{n} " * n,
        "array": np.arange(n + 1, dtype=np.float32),
        "raw": bytes([n]) * n,
        "row": {"n": [n]},
    }
    for n in range(100)
]


def written(root: Path, compression: str | None) -> Path:
    given = {"compression": compression, "hashes": ["sha1", "xxh64"], "size_limit": 6000}
    with streaming.MDSWriter(out=str(root), columns=COLUMNS, **given) as out:
        for row in ROWS:
            out.write(row)
    return root


def as_text(row: Any) -> str:
    return repr({name: getattr(row[name], "tolist", lambda name=name: row[name])() for name in COLUMNS})


@pytest.mark.parametrize("compression", [None, "gz", "gz:9", "br:5", "bz2", "snappy", "zstd:3"])
def test_shards_in_every_compression_are_their_rows(tmp_path: Path, compression: str | None) -> None:
    root = written(tmp_path / "d", compression)
    ours = open_dataset(root)
    assert [as_text(row) for row in ours] == [as_text(row) for row in ROWS]
    assert ours.catalog.extent(0).pieces[0].hash.startswith("sha1:")
    shuffled = DataLoader(ours, 8, shuffle=True, seed=1, collate_fn=list)
    assert sorted(as_text(row) for batch in shuffled for row in batch) == sorted(map(as_text, ROWS))
    theirs = streaming.StreamingDataset(
        local=str(root), validate_hash="sha1", batch_size=1, keep_zip=bool(compression)
    )
    assert [as_text(theirs[n]) for n in range(len(theirs))] == [as_text(row) for row in ours]
    streaming.base.util.clean_stale_shared_memory()


def test_a_shard_that_differs_from_its_hash_is_named(tmp_path: Path) -> None:
    root = written(tmp_path / "d", "gz")
    path = root / "shard.00000.mds.gz"
    stored = bytearray(path.read_bytes())
    stored[-1] ^= 1
    path.write_bytes(stored)
    with pytest.raises(CorruptData, match=r"shard\.00000\.mds\.gz has the sha1"):
        open_dataset(root)[0]
