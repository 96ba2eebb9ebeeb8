"""A file of fixed-size records, and a daemon that serves it."""

from __future__ import annotations

import os
from pathlib import Path

from cachesvc.catalog.options import Options
from cachesvc.client.control import Control
from cachesvc.core.model import DatasetId
from testbed.node import Daemon

EXTENT = 1 << 20
EXTENTS = 8
RECORDS = Options(format="records", record_bytes=4096)


def written(tmp_path: Path) -> bytes:
    body = os.urandom(EXTENTS * EXTENT)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/0.bin").write_bytes(body)
    return body


def options(tmp_path: Path, *more: str) -> list[str]:
    return ["--ram", "32MiB", "--allow", f"{tmp_path}/", "--extent-bytes", str(EXTENT), *more]


def opened(daemon: Daemon, tmp_path: Path) -> DatasetId:
    with Control(daemon.socket_dir) as control:
        return control.open_dataset([f"{tmp_path}/data/"], RECORDS).id
