"""`cachesvc why` names causes that are planted in real jobs: a slow transform, a slow link, a source that throttles."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from testbed import WAIT_S
from testbed.node import Daemon
from testbed.proxy_process import ProxyProcess
from testbed.servers import SeaweedFS

DATA_BYTES = 32 << 20
JOB = """
import sys, time
from cachesvc.torch import DataLoader, open_dataset
def slow(sample):
    time.sleep(float(sys.argv[1]))
    return sample
data = open_dataset(sys.argv[2], format="tokens", dtype="uint8", seq_len=4096, transform=slow)
while True:
    for batch in DataLoader(data, batch_size=16, shuffle=True, num_workers=1, window=2 << 20):
        time.sleep(0.05)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("link", "decode_s", "causes"),
    [
        ({}, "0.01", {"few workers", "decoding"}),
        ({"rate_mb": 0.2}, "0", {"full link"}),
        ({"gets_per_s": 2.0}, "0", {"throttling"}),
    ],
    ids=["transform", "link", "throttling"],
)
def test_why_names_what_is_planted(
    s3_server: SeaweedFS, tmp_path: Path, link: dict[str, float], decode_s: str, causes: set[str]
) -> None:
    client = s3_server.client()
    bucket = s3_server.create_bucket(f"why-{next(iter(link), 'transform').partition('_')[0]}")
    tokens = np.random.default_rng(0).integers(0, 256, DATA_BYTES, np.uint8)
    client.put_object(Bucket=bucket, Key="data/tokens.bin", Body=tokens.tobytes())
    options = [
        "--ram",
        "64MiB",
        "--extent-bytes",
        str(256 << 10),
        "--fillers",
        "1",
        "--allow",
        f"s3://{bucket}/",
    ]
    with (
        ProxyProcess(s3_server.endpoint, **link) as proxy,
        Daemon(tmp_path / "node", options, s3_server.env(proxy.endpoint)) as daemon,
    ):
        env = {**os.environ, **daemon.env, "CACHESVC": "require", "OMP_NUM_THREADS": "1"}
        with subprocess.Popen(
            [sys.executable, "-c", JOB, decode_s, f"s3://{bucket}/data/"], env=env, start_new_session=True
        ) as job:
            try:
                told: list[str] = []
                deadline = time.monotonic() + WAIT_S
                while not causes.intersection(told):
                    assert time.monotonic() < deadline, told
                    assert job.poll() is None
                    done = subprocess.run(
                        [sys.executable, "-m", "cachesvc", "why", "--json"],
                        env=env,
                        capture_output=True,
                        timeout=WAIT_S,
                    )
                    told += [json.loads(line)["cause"] for line in done.stdout.splitlines()]
            finally:
                job.kill()
    assert set(told) - causes <= {"nothing", "cold cache"}, (
        told
    )  # while there are few reports, and in a first epoch
