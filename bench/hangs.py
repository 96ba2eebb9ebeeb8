"""Waits of a job whose source is little faster than the job, with one GET in a hundred that hangs and without, and the
first batch of a cold job against one GET of an extent.

Both read from S3 through a proxy. Runs with and without hangs alternate, each with a new, empty daemon.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cachesvc.client.control import Control
from testbed.node import Daemon
from testbed.servers import ProxyProcess, SeaweedFS

RUNS = 3
STEP_S, SPARE, HANG_S, HANG_EVERY = 0.02, 1.1, 5.0, 100
RECORD, BATCH = 4096, 64
BATCH_BYTES = RECORD * BATCH
STEPS, WINDOW_STEPS = 1_280, 256
SLACK_S = 0.002
FIRST_RUNS, FIRST_SLACK_S, FIRST_DELAY_MS, FIRST_RATE_MB = 5, 0.2, 20.0, 90.0
FIRST_EXTENTS = 8

_JOB = f"""
import json, sys, time
from loader import DataLoader, open_dataset
uri, step_s, window = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
data = open_dataset(uri, format="records", record_bytes={RECORD})
batches = iter(DataLoader(data, batch_size={BATCH}, shuffle=True, window=window))
waits = []
while True:
    asked = time.perf_counter()
    if next(batches, None) is None:
        break
    waits.append(time.perf_counter() - asked)
    time.sleep(step_s)
print(json.dumps(waits))
"""

_FIRST = f"""
import json, sys, time
from loader import DataLoader, open_dataset
began = time.perf_counter()
data = open_dataset(sys.argv[1], format="records", record_bytes={RECORD})
opened = time.perf_counter()
next(iter(DataLoader(data, batch_size={BATCH})))
print(json.dumps([opened - began, time.perf_counter() - began]))
"""

COLUMNS = ("", "p50", "p99", "p99.9", "requests sent again", "p99.9 beyond that without", "met")


@dataclass(frozen=True, slots=True)
class Hangs:
    """The waits in next() after the first window, in seconds, of paired runs, and how many reads were hedged."""

    without: list[list[float]]
    with_hangs: list[list[float]]
    hedges: list[int]
    source_mb_s: list[float]
    """How fast the source gave the first window, by run."""

    @property
    def beyond_s(self) -> float:
        """The median of how far p99.9 lies beyond that of the paired run without hangs."""
        pairs = zip(self.with_hangs, self.without, strict=True)
        return statistics.median(_quantile(one, 0.999) - _quantile(other, 0.999) for one, other in pairs)

    @property
    def met(self) -> bool:
        """Whether hangs cost no more than is asked."""
        return self.beyond_s <= SLACK_S

    def rows(self) -> list[tuple[str, ...]]:
        """Return the cells of the table's rows."""
        met = "yes" if self.met else "NO"
        beyond = f"{self.beyond_s * 1e3:+.1f} ms (<= {SLACK_S * 1e3:.0f})"
        return [
            (f"without ({statistics.median(self.source_mb_s):.1f} MB/s)", *_cells(self.without), "", "", ""),
            ("with", *_cells(self.with_hangs), f"{statistics.median(self.hedges):.0f}", beyond, met),
        ]


@dataclass(frozen=True, slots=True)
class FirstBatches:
    """Seconds from the call of open_dataset to the first batch, and of one GET of an extent."""

    opened_s: list[float]
    ours_s: list[float]
    get_s: list[float]

    @property
    def beyond_s(self) -> float:
        """The median of the first batch's time beyond that of a GET."""
        return statistics.median(ours - get for ours, get in zip(self.ours_s, self.get_s, strict=True))

    @property
    def met(self) -> bool:
        """Whether the first batch comes as soon as is asked."""
        return self.beyond_s <= FIRST_SLACK_S

    def cells(self) -> tuple[str, ...]:
        """Return the cells of a table's row."""
        ours, opened, get = map(statistics.median, (self.ours_s, self.opened_s, self.get_s))
        return (
            "unshuffled, extents of 64 MiB",
            f"{ours:.2f} s, {opened:.2f} s of it to open",
            f"{get:.2f} s",
            f"{self.beyond_s:.2f} s",
            f"<= {FIRST_SLACK_S:.1f} s",
            "yes" if self.met else "NO",
        )


def measure(s3: SeaweedFS, root: Path) -> Hangs:
    """Run the job with and without hangs in turn."""
    _upload(s3, "hangs", STEPS, BATCH_BYTES)
    found = Hangs([], [], [], [])
    for _ in range(RUNS):
        waits, _ = _run(s3, root, 0)
        found.source_mb_s.append(WINDOW_STEPS * BATCH_BYTES / waits[0] / 1e6)
        found.without.append(waits[WINDOW_STEPS:])
        waits, hedges = _run(s3, root, HANG_EVERY)
        found.with_hangs.append(waits[WINDOW_STEPS:])
        found.hedges.append(hedges)
    return found


def first_batches(s3: SeaweedFS, root: Path) -> FirstBatches:
    """Time the first batch of unshuffled jobs, each with a new daemon, and a GET of as many bytes beside each."""
    extent_bytes = 64 << 20
    _upload(s3, "first", FIRST_EXTENTS, extent_bytes)
    found, target = FirstBatches([], [], []), s3.endpoint.removeprefix("http://")
    for _ in range(FIRST_RUNS):
        with ProxyProcess(target, delay_ms=FIRST_DELAY_MS, rate_mb=FIRST_RATE_MB) as proxy:
            found.get_s.append(_get_s(s3, proxy.endpoint, f"first/{0:05d}.bin"))
            with tempfile.TemporaryDirectory() as folder:
                options = ["--ram", "1GiB", "--allow", "s3://bench/"]
                with Daemon(Path(folder), options, s3.env(proxy.endpoint)) as daemon:
                    opened, first = _job(daemon, _FIRST, "s3://bench/first/")
        found.opened_s.append(opened)
        found.ours_s.append(first)
    return found


def _upload(s3: SeaweedFS, prefix: str, count: int, size: int) -> None:
    chance, client = np.random.default_rng(1), s3.client()
    for number in range(count):
        client.put_object(Bucket="bench", Key=f"{prefix}/{number:05d}.bin", Body=chance.bytes(size))


def _run(s3: SeaweedFS, root: Path, hang_every: int) -> tuple[list[float], int]:
    rate_mb = SPARE * BATCH_BYTES / STEP_S / 1e6
    target = s3.endpoint.removeprefix("http://")
    with ProxyProcess(target, shared_rate_mb=rate_mb, hang_s=HANG_S, hang_every=hang_every) as proxy:
        options = ["--ram", "1GiB", "--extent-bytes", str(BATCH_BYTES), "--allow", "s3://bench/"]
        with Daemon(root, options, s3.env(proxy.endpoint)) as daemon:
            waits = _job(daemon, _JOB, "s3://bench/hangs/", str(STEP_S), str(WINDOW_STEPS * BATCH_BYTES))
            with Control(daemon.socket_dir) as control:
                hedges = control.status().sources.hedges
    return waits, hedges


def _job(daemon: Daemon, script: str, *arguments: str) -> list[float]:
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env={**os.environ, **daemon.env, "CACHESVC": "require"},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    return [float(each) for each in json.loads(done.stdout.splitlines()[-1])]


def _get_s(s3: SeaweedFS, endpoint: str, key: str) -> float:
    url = s3.client(endpoint).generate_presigned_url("get_object", {"Bucket": "bench", "Key": key})
    began = time.perf_counter()
    with urllib.request.urlopen(url) as answer:
        answer.read()
    return time.perf_counter() - began


def _quantile(waits: list[float], share: float) -> float:
    return float(np.quantile(waits, share))


def _cells(runs: list[list[float]]) -> list[str]:
    found = (statistics.median(_quantile(each, share) for each in runs) for share in (0.5, 0.99, 0.999))
    return [f"{each * 1e3:.1f} ms" for each in found]
