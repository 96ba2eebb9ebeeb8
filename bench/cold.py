"""Cold epochs from S3 against `s5cmd cp` of the same bucket to memory, with and without a slow network."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from cachesvc.catalog.options import Options
from cachesvc.client.control import Control
from testbed.memory import settle
from testbed.node import Daemon
from testbed.servers import ProxyProcess, SeaweedFS

RUNS = 3
DELAY_MS = 20.0
RATE_MB = 90.0
MEMORY = "/dev/shm"

_EPOCH = """
import json, sys, time
import grpc
from testbed.memory import settle
from loader import DataLoader, open_dataset
settle()
imported = time.perf_counter()
options = json.loads(sys.argv[2])
loader_options = json.loads(sys.argv[3])
data = open_dataset(sys.argv[1], **options)
batches = DataLoader(data, batch_size=64, **loader_options)
first = None
count = 0
for batch in batches:
    first = first or time.perf_counter()
    count += 1
ended = time.perf_counter()
print(json.dumps({"epoch_s": ended - imported, "first_s": first - imported, "batches": count}))
"""


@dataclass(frozen=True)
class Cold:
    """One comparison: our seconds, the limit's seconds, the time to the first batch, and S3 bytes / dataset bytes."""

    name: str
    ours_s: list[float]
    theirs_s: list[float]
    first_s: float
    bytes_ratio: float
    asked: float
    against: str = "s5cmd"

    @property
    def ratio(self) -> float:
        """Median of the ratios of paired runs."""
        return statistics.median(a / b for a, b in zip(self.ours_s, self.theirs_s))

    def row(self) -> tuple[str, ...]:
        """Cells of the table row."""
        return (
            self.name,
            f"{statistics.median(self.ours_s):.2f} s",
            f"{statistics.median(self.theirs_s):.2f} s ({self.against})",
            f"{self.ratio:.2f} ({min(a / b for a, b in zip(self.ours_s, self.theirs_s)):.2f}-"
            f"{max(a / b for a, b in zip(self.ours_s, self.theirs_s)):.2f})",
            f"<= {self.asked:.2f}",
            "yes" if self.ratio <= self.asked else "NO",
            f"{self.first_s:.2f} s",
            f"{self.bytes_ratio:.3f}",
        )


def s5cmd(endpoint: str, s3: SeaweedFS, prefix: str) -> float:
    """Seconds that `s5cmd cp` takes to copy everything below a prefix into memory."""
    binary = shutil.which("s5cmd", path=str(Path(sys.executable).parent)) or "s5cmd"
    with tempfile.TemporaryDirectory(dir=MEMORY) as target:
        settle()
        started = time.perf_counter()
        subprocess.run(
            [binary, "--endpoint-url", endpoint, "cp", f"{prefix}*", f"{target}/"],
            env={**os.environ, **s3.env()},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        return time.perf_counter() - started


def epoch(
    daemon: Daemon, uri: str, options: dict[str, object], loader_options: dict[str, object]
) -> dict[str, float]:
    """Run one cold epoch in its own process. The time includes opening the dataset but not the imports."""
    done = subprocess.run(
        [sys.executable, "-c", _EPOCH, uri, json.dumps(options), json.dumps(loader_options)],
        env={**os.environ, **daemon.env, "CACHESVC": "require"},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    return dict(json.loads(done.stdout.splitlines()[-1]))


def compare(
    name: str,
    asked: float,
    s3: SeaweedFS,
    uri: str,
    options: dict[str, object],
    size_bytes: int,
    slow: bool,
    shuffle: bool = True,
) -> Cold:
    """Alternate runs of s5cmd and ours, each of ours with a new, empty daemon."""
    ours, theirs, firsts, ratios = [], [], [], []
    target = s3.endpoint.removeprefix("http://")
    with ProxyProcess(
        target, delay_ms=DELAY_MS if slow else 0.0, rate_mb=RATE_MB if slow else 0.0
    ) as counted:
        endpoint = counted.endpoint if slow else s3.endpoint
        s5cmd(endpoint, s3, uri)  # untimed: warms the server's page cache for both
        for _ in range(RUNS):
            theirs.append(s5cmd(endpoint, s3, uri))
            with tempfile.TemporaryDirectory() as folder:
                serve = ["--ram", "4GiB", "--allow", uri.rpartition("/")[0] + "/"]
                counted.reset()
                with Daemon(Path(folder), serve, s3.env(endpoint)) as daemon:
                    timed = epoch(daemon, uri, options, {"shuffle": shuffle})
                ours.append(timed["epoch_s"])
                firsts.append(timed["first_s"])
                if slow:
                    ratios.append(counted.counts().bytes / size_bytes)
    return Cold(
        name,
        ours,
        theirs,
        statistics.median(firsts),
        statistics.median(ratios) if ratios else float("nan"),
        asked,
    )


def index(s3: SeaweedFS, prefix: str) -> Cold:
    """Compare the first opening of tars, which indexes while it fills, with a prefetch of the same bytes as plain
    files. Runs alternate, each with a new, empty daemon."""
    ours, theirs, ratios, size = [], [], [], 0
    with ProxyProcess(s3.endpoint.removeprefix("http://"), delay_ms=DELAY_MS, rate_mb=RATE_MB) as counted:
        for _ in range(RUNS):
            theirs.append(_opened(s3, counted, prefix, Options(format="files"))[0])
            taken, size = _opened(s3, counted, prefix, Options(format="webdataset"))
            ours.append(taken)
            ratios.append(counted.counts().bytes / size)
    name = "1 GiB of tars, first opening, slow network"
    return Cold(name, ours, theirs, float("nan"), statistics.median(ratios), 1.2, "one read")


def _opened(s3: SeaweedFS, counted: ProxyProcess, prefix: str, options: Options) -> tuple[float, int]:
    with tempfile.TemporaryDirectory() as folder:
        counted.reset()
        serve = ["--ram", "4GiB", "--allow", prefix]
        with (
            Daemon(Path(folder), serve, s3.env(counted.endpoint)) as daemon,
            Control(daemon.socket_dir) as control,
        ):
            settle()
            started = time.perf_counter()
            opened = control.open_dataset([prefix], options)
            for _ in control.prefetch(opened.id):
                pass
            return time.perf_counter() - started, opened.dataset.stored_bytes
