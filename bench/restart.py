"""A replaced node: the time from a trainer's start to its first batch, with an empty cache, and after `cachesvc prefetch
--state`, which runs while the trainer imports and loads its model."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

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


class Restart(NamedTuple):
    """Seconds from the end of the imports to the first batch and to batch `STEPS`, and of the prefetch before."""

    first_s: float
    steps_s: float
    prefetch_s: float


def grid() -> Grid:
    """Measure both, each run with a new, empty daemon."""
    with tempfile.TemporaryDirectory() as folder, SeaweedFS(Path(folder) / "s3") as s3:
        s3.create_bucket("bench")
        client, rng = s3.client(), np.random.default_rng(0)
        for number in range(FILES):
            client.put_object(Bucket="bench", Key=f"tokens/{number:02d}.bin", Body=rng.bytes(FILE_BYTES))
        state = Path(folder) / "state.json"
        with ProxyProcess(s3.endpoint.removeprefix("http://"), delay_ms=DELAY_MS, rate_mb=RATE_MB) as slow:
            _run(s3, slow, state, False)  # untimed: warms the server, and makes the state
            found = {warm: [_run(s3, slow, state, warm) for _ in range(RUNS)] for warm in (False, True)}
    rows = [
        (name, *(f"{statistics.median(column):.2f} s" for column in zip(*found[warm], strict=True)))
        for name, warm in (("an empty cache", False), (f"after prefetch --state --steps {STEPS}", True))
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
