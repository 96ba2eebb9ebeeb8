"""Waits of a job whose source is little faster than the job, with one GET in a hundred that hangs and without, beside
torch's DataLoader and MosaicML Streaming; and the first batch of a cold job against one GET of an extent.

All read from S3 through a proxy. A step takes 20 ms. Runs with and without hangs alternate, the one that is first too, each
with an empty cache. What a run waits for its first window is not counted.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from bench.compare import PEERS_PYTHON
from cachesvc.client.control import Control
from testbed import ROOT
from testbed.node import Daemon
from testbed.servers import ProxyProcess, SeaweedFS

RUNS, STEPS = 2, 3_072
PEER_STEPS = 1_024
"""The other loaders wait for whole hangs, which would take minutes."""
STEP_S, SPARE, HANG_S, HANG_EVERY = 0.02, 1.1, 5.0, 100
RECORD, BATCH, WINDOW_STEPS = 4096, 64, 256
BATCH_BYTES = RECORD * BATCH
PEER_WORKERS = 8
SLACK_S = 0.002
FIRST_RUNS, FIRST_SLACK_S, FIRST_DELAY_MS, FIRST_RATE_MB = 5, 0.2, 20.0, 90.0
FIRST_EXTENTS = 8

_STEPS = """
def run(batches, steps, step_s):
    waits, failed = [], 1
    try:
        reading = iter(batches)
        while len(waits) < steps:
            asked = time.perf_counter()
            if next(reading, None) is None:
                break
            waits.append(time.perf_counter() - asked)
            time.sleep(step_s)
        failed = 0
    finally:
        if failed:
            traceback.print_exc()
        print(json.dumps(waits))
        sys.stdout.flush()
        os._exit(failed)  # a loader that is in the middle of an epoch may take long to end
"""

_OURS = f"""
import json, os, sys, time, traceback
from loader import DataLoader, open_dataset
{_STEPS}
steps = int(sys.argv[1])
data = open_dataset("s3://bench/hangs/", format="records", record_bytes={RECORD})
run(DataLoader(data, {BATCH}, shuffle=True, window={WINDOW_STEPS * BATCH_BYTES}), steps, {STEP_S})
"""

_TORCH = f"""
import json, os, sys, time, traceback
import boto3, torch
from botocore.config import Config
from torch.utils.data import DataLoader, Dataset
{_STEPS}
class Objects(Dataset):
    client = None
    def __len__(self):
        return {STEPS}
    def __getitem__(self, number):
        if self.client is None:
            self.client = boto3.client("s3", config=Config(s3={{"addressing_style": "path"}}))
        body = self.client.get_object(Bucket="bench", Key=f"hangs/{{number:05d}}.bin")["Body"].read()
        return torch.frombuffer(bytearray(body), dtype=torch.uint8).reshape({BATCH}, {RECORD})
batches = DataLoader(Objects(), None, shuffle=True, num_workers={PEER_WORKERS}, prefetch_factor=8)
run(batches, int(sys.argv[1]), {STEP_S})
"""

_STREAMING = f"""
import json, os, sys, time, traceback
import numpy as np
from bench.peers.mosaic import MDSWriter, StreamingDataLoader, StreamingDataset, clean_stale_shared_memory
{_STEPS}
steps, folder = int(sys.argv[1]), sys.argv[2]
if not steps:
    columns, rng = {{"x": "ndarray:uint8:{RECORD}"}}, np.random.default_rng(1)
    with MDSWriter(out=folder, columns=columns, size_limit={BATCH_BYTES}) as writer:
        for _ in range({PEER_STEPS * BATCH}):
            writer.write({{"x": rng.integers(0, 256, {RECORD}, np.uint8)}})
    raise SystemExit
clean_stale_shared_memory()
window = {WINDOW_STEPS * BATCH}
data = StreamingDataset(remote="s3://bench/mds/", local=folder, shuffle=True, batch_size={BATCH}, predownload=window,
    shuffle_block_size=window, num_canonical_nodes=1)
run(StreamingDataLoader(data, batch_size={BATCH}, num_workers={PEER_WORKERS}), steps, {STEP_S})
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

COLUMNS = (
    "",
    *("p50", "p99", "p99.9", "longest", "of so many steps", "seconds waited in a run"),
    *("sent again", "p99.9 beyond that without", "met"),
)


@dataclass(frozen=True, slots=True)
class Waits:
    """The waits in next() after the first window of one loader, in seconds, run by run, and how many reads were hedged."""

    name: str
    without: list[list[float]] = field(default_factory=list)
    with_hangs: list[list[float]] = field(default_factory=list)
    hedges: list[int] = field(default_factory=list)
    asked: bool = False
    """Whether the difference has a limit."""

    @property
    def beyond_s(self) -> float:
        """How far p99.9 of all runs lies beyond that of all runs without hangs."""
        return _quantile(self.with_hangs, 0.999) - _quantile(self.without, 0.999)

    @property
    def met(self) -> bool:
        """Whether hangs cost no more than is asked."""
        return not self.asked or self.beyond_s <= SLACK_S

    def rows(self) -> list[tuple[str, ...]]:
        """Return the cells of the table's rows."""
        beyond = f"{self.beyond_s * 1e3:+.1f} ms"
        limit = (
            (f"{beyond} (<= {SLACK_S * 1e3:.0f})", "yes" if self.met else "NO")
            if self.asked
            else (beyond, "")
        )
        hedges = f"{statistics.median(self.hedges):.0f}" if self.hedges else ""
        return [
            (self.name, *_cells(self.without), "", "", ""),
            (f"{self.name}, with hangs", *_cells(self.with_hangs), hedges, *limit),
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


def measure(s3: SeaweedFS, root: Path, steps: int = STEPS, peer_steps: int = PEER_STEPS) -> list[Waits]:
    """Run the job with and without hangs in turn, with each loader. Streaming is left out where it is not installed."""
    _upload(s3, "hangs", STEPS, BATCH_BYTES)
    found = [_alternated(Waits("ours", asked=True), s3, RUNS, partial(_ours, root, s3, steps))]
    torchs = partial(_peer, s3, sys.executable, _TORCH, peer_steps)
    found.append(_alternated(Waits(f"torch's DataLoader, {PEER_WORKERS} workers"), s3, 1, torchs))
    if os.access(PEERS_PYTHON, os.X_OK):
        with tempfile.TemporaryDirectory() as folder:
            _script(PEERS_PYTHON, _STREAMING, "0", folder)
            s3.upload(Path(folder), "bench", "mds/")
        streaming = partial(_peer, s3, PEERS_PYTHON, _STREAMING, peer_steps)
        name = f"MosaicML Streaming, {PEER_WORKERS} workers"
        found.append(_alternated(Waits(name), s3, 1, streaming))
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
                    environment = daemon.env | {"CACHESVC": "require"}
                    opened, first = _script(
                        sys.executable, _FIRST, "s3://bench/first/", environment=environment
                    )
        found.opened_s.append(opened)
        found.ours_s.append(first)
    return found


def _upload(s3: SeaweedFS, prefix: str, count: int, size: int) -> None:
    chance, client = np.random.default_rng(1), s3.client()
    for number in range(count):
        client.put_object(Bucket="bench", Key=f"{prefix}/{number:05d}.bin", Body=chance.bytes(size))


def _alternated(
    found: Waits, s3: SeaweedFS, runs: int, run: Callable[[ProxyProcess], tuple[list[float], int | None]]
) -> Waits:
    """Run with and without hangs in turn; in every other pair the run with hangs is first."""
    target, rate_mb = s3.endpoint.removeprefix("http://"), SPARE * BATCH_BYTES / STEP_S / 1e6
    for pair in range(runs):
        for hang_every in (0, HANG_EVERY) if pair % 2 == 0 else (HANG_EVERY, 0):
            with ProxyProcess(target, shared_rate_mb=rate_mb, hang_s=HANG_S, hang_every=hang_every) as proxy:
                waits, hedges = run(proxy)
            (found.with_hangs if hang_every else found.without).append(waits[WINDOW_STEPS:])
            if hang_every and hedges is not None:
                found.hedges.append(hedges)
    return found


def _ours(root: Path, s3: SeaweedFS, steps: int, proxy: ProxyProcess) -> tuple[list[float], int]:
    options = ["--ram", "1GiB", "--extent-bytes", str(BATCH_BYTES), "--allow", "s3://bench/"]
    with Daemon(root, options, s3.env(proxy.endpoint)) as daemon:
        waits = _script(sys.executable, _OURS, str(steps), environment=daemon.env | {"CACHESVC": "require"})
        with Control(daemon.socket_dir) as control:
            return waits, control.status().sources.hedges


def _peer(
    s3: SeaweedFS, python: str, script: str, steps: int, proxy: ProxyProcess
) -> tuple[list[float], None]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # its workers may end later
        environment = s3.env(proxy.endpoint) | {"S3_ENDPOINT_URL": proxy.endpoint}
        try:
            return _script(python, script, str(steps), folder, environment=environment), None
        except subprocess.CalledProcessError as error:  # the row counts the steps until then
            return _numbers(error.stdout), None


def _script(
    python: str, script: str, *arguments: str, environment: dict[str, str] | None = None
) -> list[float]:
    """Run a script in a process of its own; return the numbers in its last line, if it printed any."""
    done = subprocess.run(
        [python, "-c", script, *arguments],
        env={**os.environ, "PYTHONWARNINGS": "ignore", **(environment or {})},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    return _numbers(done.stdout)


def _numbers(printed: str) -> list[float]:
    return [float(each) for each in json.loads((printed.splitlines() or ["[]"])[-1])]


def _get_s(s3: SeaweedFS, endpoint: str, key: str) -> float:
    url = s3.client(endpoint).generate_presigned_url("get_object", {"Bucket": "bench", "Key": key})
    began = time.perf_counter()
    with urllib.request.urlopen(url) as answer:
        answer.read()
    return time.perf_counter() - began


def _quantile(runs: list[list[float]], share: float) -> float:
    waits = np.concatenate(runs)
    return float(np.quantile(waits, share)) if waits.size else math.nan


def _cells(runs: list[list[float]]) -> list[str]:
    shares = (_quantile(runs, share) for share in (0.5, 0.99, 0.999, 1.0))
    waited_s = statistics.median(map(sum, runs))
    return [*(f"{each * 1e3:.1f} ms" for each in shares), f"{sum(map(len, runs)):,}", f"{waited_s:.2f}"]
