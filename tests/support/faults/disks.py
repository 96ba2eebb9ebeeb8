"""A daemon over disks that tests make fail."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachesvc.catalog.options import Options
from cachesvc.client.control import Control
from cachesvc.client.grants import DaemonGrants
from cachesvc.client.protocol import Granted
from cachesvc.core.model import DatasetId
from cachesvc.v1 import cachesvc_pb2 as pb
from testbed.node import Daemon
from tests.support.faults.faulty_disk import FaultyDisk

EXTENT = 64 << 10
EXTENTS = 32
RECORDS = Options(format="records", record_bytes=4096)
LOST_S = 30.0
AGAIN_S = 60.0
"""A full disk is retried after 30 s. A lost disk is back after three good probes, 5 s apart."""


def sample(root: Path) -> bytes:
    """Write the data that `node` serves below a folder; return its bytes."""
    body = random.Random(7).randbytes(EXTENTS * EXTENT)
    (root / "data").mkdir()
    (root / "data/0.bin").write_bytes(body)
    return body


class Node:
    """A daemon over NVMe directories, with an open dataset."""

    def __init__(self, daemon: Daemon, dataset: DatasetId, control: Control, data: bytes) -> None:
        self.daemon, self.dataset, self.control, self.data = daemon, dataset, control, data

    def tier(self, name: str = "nvme0") -> pb.TierStatus:
        return next(tier for tier in self.control.status().tiers if tier.name == name)

    def fill(self) -> None:
        *_, last = self.control.prefetch(self.dataset)
        assert last.resident_extents == EXTENTS

    def read(self) -> int:
        """Read every extent; return how many were granted. Each is either correct or refused within seconds."""
        grants = DaemonGrants(self.daemon.socket_dir, self.dataset)
        granted = 0
        for index in range(EXTENTS):
            (answer,) = grants.acquire([index], LOST_S + 15.0)
            if isinstance(answer, Granted):
                with contextlib.suppress(OSError):  # the disk failed during the read
                    found = os.pread(answer.fd, EXTENT, 0)
                    assert found == self.data[index * EXTENT : (index + 1) * EXTENT], "a wrong byte"
                    granted += 1
                os.close(answer.fd)
                grants.release([index])
        grants.close()
        return granted


def lost(found: Node) -> bool:
    return bool(found.tier().lost)


@contextlib.contextmanager
def node(
    tmp_path: Path, data: bytes, *nvme: str, ram: str = "0", more: tuple[str, ...] = ()
) -> Iterator[Node]:
    options = ["--ram", ram, "--allow", f"{tmp_path}/", "--extent-bytes", str(EXTENT), *more]
    for spec in nvme:
        options += ["--nvme", spec]
    with Daemon(tmp_path / "node", options) as daemon:
        with Control(daemon.socket_dir) as control:
            dataset = control.open_dataset([f"{tmp_path}/data/"], RECORDS).id
            yield Node(daemon, dataset, control, data)
        assert daemon.process is not None
        assert daemon.process.poll() is None, daemon.log
        assert "Traceback" not in daemon.log, daemon.log


@contextlib.contextmanager
def on_faulty_disk(
    tmp_path: Path, data: bytes, *more: str, size: str = "4MiB", ram: str = "0"
) -> Iterator[tuple[FaultyDisk, Node]]:
    """A disk and a node over it. The disk works again at the end: a daemon that hangs in it cannot be ended."""
    with (
        FaultyDisk(tmp_path) as disk,
        node(tmp_path, data, f"{disk.path}={size}", ram=ram, more=more) as found,
    ):
        try:
            yield disk, found
        finally:
            disk.behave("")


def stored(directory: Path) -> list[Path]:
    return sorted((directory / "cachesvc-nvme/v1/extents").rglob("?" * 32 + ".*"))


def flip(path: Path, at: int) -> None:
    """Flip a bit of a file."""
    path.chmod(0o600)
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


@contextlib.contextmanager
def mounted(path: Path, options: str) -> Iterator[Path]:
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "none", str(path)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("NOT TESTED: small disks need root and the right to mount a tmpfs")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)
