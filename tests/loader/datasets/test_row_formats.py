"""Rows of each format are read exactly once by two ranks, shuffled and resumed in mid-epoch, directly and by a daemon from
S3. Files of MDS, litData, TFRecord and WebDataset were written by those projects; `make compat` writes them anew."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.node import Daemon
from testbed.servers import SeaweedFS
from tests.support.formats.row_ledger import FORMATS, ledger, ours, rows

KEPT = Path(__file__).parents[2] / "support" / "formats" / "rows"
BUCKET = "row-formats"
OWN = ("jsonl", "csv", "parquet", "arrow")


def folder_of(format: str, scratch: Path) -> Path:
    """Return the folder of a format; write it if its writer is a library of our own tests."""
    if format not in OWN:
        return KEPT / format
    root = scratch / format
    root.mkdir()
    _, write, read = FORMATS[format]
    write(root)
    assert ledger(read(root)) == ledger(rows())
    return root


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, s3_server: SeaweedFS) -> Iterator[Daemon]:
    s3_server.create_bucket(BUCKET)
    options = ["--ram", "64MiB", "--allow", f"s3://{BUCKET}/"]
    with Daemon(tmp_path_factory.mktemp("node"), options, s3_server.env()) as found:
        yield found


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("workers", [0, 2])
def test_rows_are_read_exactly_once_directly(tmp_path: Path, format: str, workers: int) -> None:
    assert ours(folder_of(format, tmp_path), workers) == ledger(rows())


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("workers", [0, 2])
def test_rows_are_read_exactly_once_by_a_daemon_from_s3(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    daemon: Daemon,
    s3_server: SeaweedFS,
    format: str,
    workers: int,
) -> None:
    for name, value in (daemon.env | {"CACHESVC": "require"}).items():
        monkeypatch.setenv(name, value)
    root, client = folder_of(format, tmp_path), s3_server.client()
    for path in root.rglob("*"):
        if path.is_file():
            client.upload_file(str(path), BUCKET, f"{format}/{path.relative_to(root)}")
    assert ours(f"s3://{BUCKET}/{format}/", workers) == ledger(rows())
