"""Reads through a daemon whose source fails, such as a FUSE mount."""

from __future__ import annotations

import os

import pytest

from cachesvc.catalog.options import Options
from cachesvc.client.control import Control
from cachesvc.client.grants import DaemonGrants
from cachesvc.client.protocol import Granted
from testbed.node import Daemon
from tests.support.faults.fuse import FaultyMount

EXTENT = 1 << 20
RECORDS = Options(format="records", record_bytes=4096)
needs_fuse = pytest.mark.skipif(bool(FaultyMount.why_not()), reason=FaultyMount.why_not())


def extent(daemon: Daemon, uri: str, index: int = 0, timeout_s: float = 120.0) -> bytes:
    """Bytes of one extent, read through the daemon."""
    with Control(daemon.socket_dir) as control:
        dataset = control.open_dataset([uri], RECORDS).id
    grants = DaemonGrants(daemon.socket_dir, dataset)
    try:
        (answer,) = grants.acquire([index], timeout_s)
        assert isinstance(answer, Granted)
        with os.fdopen(answer.fd, "rb") as file:
            return os.pread(file.fileno(), answer.size_bytes, 0)
    finally:
        grants.close()
