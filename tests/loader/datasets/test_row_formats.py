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


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, s3_server: SeaweedFS) -> Iterator[Daemon]:
    s3_server.create_bucket(BUCKET)
    options = ["--ram", "64MiB", "--allow", f"s3://{BUCKET}/"]
    with Daemon(tmp_path_factory.mktemp("node"), options, s3_server.env()) as found:
        yield found


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("workers", [0, 2])
def test_rows_are_read_exactly_once_directly(format: str, workers: int) -> None:
    assert ours(KEPT / format, workers) == ledger(rows())


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("workers", [0, 2])
def test_rows_are_read_exactly_once_by_a_daemon_from_s3(
    monkeypatch: pytest.MonkeyPatch, daemon: Daemon, s3_server: SeaweedFS, format: str, workers: int
) -> None:
    for name, value in (daemon.env | {"CACHESVC": "require"}).items():
        monkeypatch.setenv(name, value)
    root, client = KEPT / format, s3_server.client()
    for path in root.rglob("*"):
        if path.is_file():
            client.upload_file(str(path), BUCKET, f"{format}/{path.relative_to(root)}")
    assert ours(f"s3://{BUCKET}/{format}/", workers) == ledger(rows())
