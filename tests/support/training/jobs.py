"""Parts of whole jobs: a daemon, an S3 server behind a counting proxy, trainers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np

from cachesvc.client.control import Control
from testbed.forked import TRAINER, ForkedProcess
from testbed.node import Daemon
from testbed.servers import Proxy, SeaweedFS
from tests.support.training.trainer import digest

EXTENT = 1 << 20
RECORD = 4096
PER_EXTENT = EXTENT // RECORD
EXTENTS = 8
SAMPLES = EXTENTS * PER_EXTENT
RECORDS: dict[str, Any] = {"format": "records", "record_bytes": RECORD}


@dataclass(frozen=True)
class Node:
    """A daemon that serves a bucket, and the proxy that counts what it fetches."""

    daemon: Daemon
    proxy: Proxy
    s3: SeaweedFS
    bucket: str

    def ram(self) -> Any:
        """Status of the RAM tier."""
        with Control(self.daemon.socket_dir) as control:
            return next(tier for tier in control.status().tiers if tier.name == "ram")

    def readers(self) -> int:
        """Number of connections that read a dataset."""
        with Control(self.daemon.socket_dir) as control:
            return int(control.status().readers)

    def put(self, objects: dict[str, bytes]) -> str:
        """Upload objects under a new prefix; return its URI."""
        prefix, client = uuid.uuid4().hex[:8], self.s3.client()
        for name, body in objects.items():
            client.put_object(Bucket=self.bucket, Key=f"{prefix}/{name}", Body=body)
        return f"s3://{self.bucket}/{prefix}/"


@dataclass(frozen=True)
class Records:
    """A dataset with one extent per object; `rows[i]` is sample i."""

    uri: str
    rows: np.ndarray[Any, Any]


def records_at(node: Node) -> Records:
    rows = np.random.default_rng(uuid.uuid4().int).integers(0, 256, (SAMPLES, RECORD), np.uint8)
    return Records(node.put(objects(rows)), rows)


def objects(rows: np.ndarray[Any, Any]) -> dict[str, bytes]:
    return {
        f"{n}.bin": rows[n * PER_EXTENT : (n + 1) * PER_EXTENT].tobytes()
        for n in range(len(rows) // PER_EXTENT)
    }


class Trainer:
    """`tests.support.training.trainer` as a process, with no credentials other than those in `env`."""

    def __init__(self, folder: Path, uri: str, loading: dict[str, Any], env: dict[str, str]) -> None:
        self.folder = folder
        (folder / "tmp").mkdir(parents=True)
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "CACHESVC"))}
        clean |= {"HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache"), "TMPDIR": str(folder / "tmp")}
        with open(folder / "log", "wb") as log:
            self.process = ForkedProcess(
                [
                    sys.executable,
                    "-m",
                    "tests.support.training.trainer",
                    uri,
                    json.dumps(RECORDS),
                    json.dumps(loading),
                ],
                env=clean | {"AWS_EC2_METADATA_DISABLED": "true"} | env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                preloaded=TRAINER,
            )

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.close()

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def tell(self, batches: int) -> None:
        """Let the trainer take this many more batches."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{batches}\n")
        self.process.stdin.flush()

    def said(self) -> dict[str, Any]:
        """Next line that the trainer prints."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the trainer ended: {self.log}"
        found: dict[str, Any] = json.loads(line)
        return found

    def take(self, batches: int) -> list[dict[str, Any]]:
        """Let the trainer take this many batches, and return the line for each."""
        self.tell(batches)
        return [self.said() for _ in range(batches)]

    def children(self) -> list[int]:
        pid = self.process.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def exactly_once(said: list[dict[str, Any]], rows: np.ndarray[Any, Any]) -> None:
    """Assert that the trainers saw every sample once, and each with its own bytes."""
    assert all("indices" in one for one in said), said
    indices = [index for one in said for index in one["indices"]]
    assert sorted(indices) == list(range(len(rows)))
    digests = [found for one in said for found in one["digests"]]
    assert digests == [digest(rows[index].tobytes()) for index in indices]


def fetched(node: Node) -> int:
    """Bytes of objects that were requested, whole or in ranges. Listings, which have a query, do not count."""
    total = 0
    client = node.s3.client()
    for key, count in node.proxy.counts.by.items():
        first, dash, last = key.partition("bytes=")[2].partition("-")
        if dash:
            total += count * (int(last) - int(first) + 1)
        elif key.startswith("GET ") and "?" not in key:
            bucket, _, name = unquote(key.removeprefix("GET /")).partition("/")
            total += count * int(client.head_object(Bucket=bucket, Key=name)["ContentLength"])
    return total
