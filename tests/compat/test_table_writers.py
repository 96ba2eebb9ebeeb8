"""Files that Polars and DuckDB write, read by ours and by pyarrow or their own reader."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from loader import open_dataset

ROWS = 100


IPC: dict[str, Callable[[Any, Path], None]] = {
    "plain": lambda frame, path: frame.write_ipc(path),
    "lz4": lambda frame, path: frame.write_ipc(path, compression="lz4"),
    "zstd": lambda frame, path: frame.write_ipc(path, compression="zstd"),
    "stream": lambda frame, path: frame.write_ipc_stream(path),
    "lazy": lambda frame, path: frame.lazy().sink_ipc(path),
}


@pytest.mark.parametrize("writer", IPC)
def test_ipc_files_of_polars_are_what_pyarrow_reads(tmp_path: Path, writer: str) -> None:
    polars: Any = pytest.importorskip("polars")
    frame = polars.DataFrame(
        {
            "n": range(ROWS),
            "text": [f"s{n}" * (n % 9) if n % 7 else None for n in range(ROWS)],
            "kind": polars.Series([f"k{n % 3}" for n in range(ROWS)], dtype=polars.Categorical),
            "ids": [list(range(n % 4)) for n in range(ROWS)],
            "pair": [{"x": n, "y": f"y{n}"} for n in range(ROWS)],
        }
    )
    IPC[writer](frame, tmp_path / "a.arrow")
    read = pa.ipc.open_stream if writer == "stream" else pa.ipc.open_file
    with read(tmp_path / "a.arrow") as file:
        expected = file.read_all().to_pylist()
    found = [
        {name: value.tolist() if hasattr(value, "tolist") else value for name, value in row.items()}
        for row in open_dataset(tmp_path)
    ]
    assert found == expected


def test_json_of_duckdb_is_what_its_text_says(tmp_path: Path) -> None:
    duckdb: Any = pytest.importorskip("duckdb")
    value = json.dumps({"name": "f", "arguments": {"city": "Paris " * 9}})
    duckdb.execute(
        f"copy (select '{value}'::json as call, ['{value}'::json] as calls, i from range(5000) t(i)) "
        f"to '{tmp_path}/a.parquet'"
    )
    dataset = open_dataset(tmp_path)
    assert [dataset[at] for at in (0, 4999)] == [
        {"call": json.loads(value), "calls": [json.loads(value)], "i": at} for at in (0, 4999)
    ]
