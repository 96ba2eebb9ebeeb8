"""DuckDB, pandas and Polars read files through `cachesvc://`, as docs/data.md says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

ROWS = 100


@pytest.fixture
def url(tmp_path: Path) -> str:
    pq.write_table(pa.table({"i": range(ROWS)}), tmp_path / "a.parquet")
    (tmp_path / "a.csv").write_text("i\n" + "".join(f"{n}\n" for n in range(ROWS)))
    return f"cachesvc://file{tmp_path}/a.parquet"


def test_duckdb_queries_a_url(url: str) -> None:
    duckdb: Any = pytest.importorskip("duckdb")
    connection = duckdb.connect()
    connection.register_filesystem(fsspec.filesystem("cachesvc"))
    assert connection.execute(f"SELECT count(*), sum(i) FROM '{url}'").fetchone() == (ROWS, 4950)


def test_pandas_reads_a_url(url: str) -> None:
    pandas: Any = pytest.importorskip("pandas")
    assert len(pandas.read_parquet(url)) == len(pandas.read_csv(url.replace("parquet", "csv"))) == ROWS


def test_pyarrow_reads_a_url_with_its_prefix(url: str) -> None:
    assert pq.read_table(f"fsspec+{url}").num_rows == ROWS


def test_polars_reads_an_open_file_and_a_url_by_pyarrow(url: str) -> None:
    polars: Any = pytest.importorskip("polars")
    files = fsspec.filesystem("cachesvc")
    assert len(polars.scan_parquet(files.open(url)).collect()) == ROWS
    assert len(polars.read_csv(files.open(url.replace("parquet", "csv")))) == ROWS
    assert len(polars.read_parquet(url, use_pyarrow=True)) == ROWS


def test_polars_takes_no_url_of_fsspec_elsewhere(url: str) -> None:
    """It names the URL. When this fails, docs/data.md can say more."""
    polars: Any = pytest.importorskip("polars")
    with pytest.raises(Exception, match="cachesvc://"):
        polars.scan_parquet(url).collect()
