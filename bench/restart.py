"""A replaced node: the time from a trainer's start to its first batch, with an empty cache, and after `cachesvc prefetch
--state`, which runs while the trainer imports and loads its model. Given a Python that has MosaicML Streaming, that resumes
from its own state over MDS shards of as many tokens."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.cold import DELAY_MS, RATE_MB
from bench.grid import Grid
from testbed.node import Daemon
from testbed.servers import ProxyProcess, SeaweedFS

RUNS, FILES, FILE_BYTES, STEPS = 3, 16, 64 << 20, 50
_TRAINER = """
import json, sys, time
from itertools import islice
from loader import DataLoader, open_dataset
imported = time.perf_counter()
tokens = open_dataset(sys.argv[1], format="tokens", dtype="uint16", seq_len=2048, overlap=1)
batches = DataLoader(tokens, 64, shuffle=True, epochs=None)
if sys.argv[2]:
    batches.load_state_dict(json.loads(sys.argv[2]))
times = []
for _ in islice(batches, int(sys.argv[3])):
    times.append(time.perf_counter() - imported)
print(json.dumps({"first_s": times[0], "steps_s": times[-1], "state": batches.state_dict()}))
"""


_STREAMING = """
import json, sys, time
from itertools import islice
import numpy as np
from bench.peers.mosaic import SHARD_BYTES, MDSWriter, StreamingDataLoader, StreamingDataset, clean_stale_shared_memory
imported = time.perf_counter()
remote, local, saved, steps = sys.argv[1:5]
if not steps:
    tokens = np.random.default_rng(0).integers(0, 1 << 16, (int(saved), 2049), np.uint16)
    with MDSWriter(out=local, columns={"x": "ndarray:uint16:2049"}, size_limit=SHARD_BYTES) as writer:
        for row in tokens:
            writer.write({"x": row})
    raise SystemExit
clean_stale_shared_memory()
imported = time.perf_counter()
batches = StreamingDataLoader(StreamingDataset(remote=remote, local=local, shuffle=True, batch_size=64), batch_size=64)
if saved:
    batches.load_state_dict(json.loads(saved))
times = []
for _ in islice(batches, int(steps)):
    times.append(time.perf_counter() - imported)
print(json.dumps({"first_s": times[0], "steps_s": times[-1], "state": batches.state_dict()}))
"""


class Restart(NamedTuple):
    """Seconds from the end of the imports to the first batch and to batch `STEPS`, and of the prefetch before."""

    first_s: float
    steps_s: float
    prefetch_s: float


def grid(streaming_python: str = "") -> Grid:
    """Measure all, each run with a new, empty daemon or folder."""
    with tempfile.TemporaryDirectory() as folder, SeaweedFS(Path(folder) / "s3") as s3:
        s3.create_bucket("bench")
        client, rng = s3.client(), np.random.default_rng(0)
        for number in range(FILES):
            client.put_object(Bucket="bench", Key=f"tokens/{number:02d}.bin", Body=rng.bytes(FILE_BYTES))
        state = Path(folder) / "state.json"
        with ProxyProcess(s3.endpoint.removeprefix("http://"), delay_ms=DELAY_MS, rate_mb=RATE_MB) as slow:
            _run(s3, slow, state, False)  # untimed: warms the server, and makes the state
            found = {
                name: [_run(s3, slow, state, warm) for _ in range(RUNS)]
                for name, warm in (
                    ("an empty cache", False),
                    (f"after prefetch --state --steps {STEPS}", True),
                )
            }
            if streaming_python:
                found["MosaicML Streaming, an empty folder"] = _streaming(
                    streaming_python, s3, slow, Path(folder)
                )
    rows = [
        (
            name,
            *(
                f"{middle:.2f} s" if (middle := statistics.median(column)) else ""
                for column in zip(*runs, strict=True)
            ),
        )
        for name, runs in found.items()
    ]
    title = f"a trainer on a replaced node: 1 GiB of tokens, {DELAY_MS:.0f} ms and {RATE_MB:.0f} MB/s a connection"
    return Grid(title, ("", "first batch", f"batch {STEPS}", "prefetch"), rows)


def _run(s3: SeaweedFS, slow: ProxyProcess, state: Path, warm: bool) -> Restart:
    with tempfile.TemporaryDirectory() as folder:
        serve = ["--ram", "4GiB", "--allow", "s3://bench/"]
        with Daemon(Path(folder), serve, s3.env(slow.endpoint)) as daemon:
            environ = {**os.environ, **daemon.env, "CACHESVC": "require"}
            began = time.perf_counter()
            if warm:
                command = [
                    "-m",
                    "cachesvc",
                    "prefetch",
                    "--state",
                    str(state),
                    "--steps",
                    str(STEPS),
                    "--json",
                ]
                subprocess.run([sys.executable, *command], env=environ, stdout=subprocess.DEVNULL, check=True)
            prefetch_s = time.perf_counter() - began if warm else 0.0
            saved = state.read_text() if state.exists() else ""
            command = ["-c", _TRAINER, "s3://bench/tokens/", saved, str(STEPS)]
            done = subprocess.run(
                [sys.executable, *command], env=environ, stdout=subprocess.PIPE, check=True, text=True
            )
    row = json.loads(done.stdout.splitlines()[-1])
    if not saved:
        state.write_text(json.dumps(row["state"]))
    return Restart(row["first_s"], row["steps_s"], prefetch_s)


def _streaming(python: str, s3: SeaweedFS, slow: ProxyProcess, folder: Path) -> list[Restart]:
    """Write shards, make a state in an untimed run, and resume from it in new folders."""
    environ = os.environ | s3.env(slow.endpoint) | {"S3_ENDPOINT_URL": slow.endpoint}

    def run(*words: str) -> dict[str, Any]:
        command = [python, "-c", _STREAMING, *words]
        done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, check=True, text=True)
        row: dict[str, Any] = json.loads((done.stdout.splitlines() or ["{}"])[-1])
        return row

    run("", str(folder / "mds"), str(FILES * FILE_BYTES // 4098), "")
    for shard in (folder / "mds").iterdir():
        s3.client().upload_file(str(shard), "bench", f"mds/{shard.name}")
    remote, saved, found = "s3://bench/mds", "", []
    for _ in range(RUNS + 1):
        with tempfile.TemporaryDirectory() as local:
            row = run(remote, f"{local}/mds", saved, str(STEPS))
        if saved:
            found.append(Restart(row["first_s"], row["steps_s"], 0.0))
        saved = saved or json.dumps(row["state"])
    return found
