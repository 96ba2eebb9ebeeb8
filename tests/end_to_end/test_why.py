"""`cachesvc why` names causes that are planted in real jobs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from testbed import WAIT_S
from testbed.cluster import Cluster, Node, by_file
from testbed.node import Daemon
from testbed.proxy_process import ProxyProcess
from testbed.servers import SeaweedFS
from tests.support.faults.faulty_disk import FaultyDisk

MIB = 1 << 20
DATA_BYTES = 32 * MIB
EXTENT = 256 << 10
CORES = len(os.sched_getaffinity(0))
JOB = """
import json, sys, time
from cachesvc.torch import DataLoader, open_dataset
given = json.loads(sys.argv[1])
def slow(sample):
    time.sleep(given.get("decode_s", 0))
    return sample
data = open_dataset(given["uri"], **given["options"], transform=slow)
began = time.monotonic()
while True:
    loader = DataLoader(
        data, batch_size=16, shuffle=True, num_workers=given.get("workers", 1), window=given.get("window", 2 << 20)
    )
    for batch in loader:
        time.sleep(given.get("step_s", 0.05))
        if given.get("pause_s") and time.monotonic() - began > 3:
            time.sleep(given["pause_s"])
            began = time.monotonic()
"""
TOKENS = {"format": "tokens", "dtype": "uint8", "seq_len": 4096}
BEFORE = {"nothing", "cold cache"}
"""What is said while there are few reports, and in a first epoch."""


def told(job: Mapping[str, object], environment: Mapping[str, str], causes: set[str]) -> list[str]:
    """Run a job until `why` says one of the causes; return all that it said."""
    env = {**os.environ, **environment, "CACHESVC": "require", "OMP_NUM_THREADS": "1"}
    said: list[str] = []
    with subprocess.Popen(
        [sys.executable, "-c", JOB, json.dumps(job)], env=env, start_new_session=True
    ) as process:
        try:
            deadline = time.monotonic() + 2 * WAIT_S
            while not causes.intersection(said):
                assert time.monotonic() < deadline, said
                assert process.poll() is None
                verb = [sys.executable, "-m", "cachesvc", "why", "--json"]
                done = subprocess.run(verb, env=env, capture_output=True, timeout=WAIT_S)
                said += [json.loads(line)["cause"] for line in done.stdout.splitlines()]
        finally:
            os.killpg(process.pid, 9)
    return said


def put(server: SeaweedFS, name: str) -> str:
    """Put tokens into a bucket; return their URI."""
    bucket = server.create_bucket(f"why-{name.replace(' ', '-')}")
    tokens = np.random.default_rng(0).integers(0, 256, DATA_BYTES, np.uint8)
    server.client().put_object(Bucket=bucket, Key="data/tokens.bin", Body=tokens.tobytes())
    return f"s3://{bucket}/data/"


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize(
    ("cause", "link", "ram", "job"),
    [
        ("few workers", {}, "64MiB", {"decode_s": 0.01, "workers": 0}),
        ("decoding", {}, "64MiB", {"decode_s": 0.01, "workers": CORES}),
        ("full link", {"rate_mb": 0.2}, "64MiB", {}),
        ("throttling", {"gets_per_s": 2.0}, "64MiB", {}),
        ("small cache", {"rate_mb": 4.0}, "12MiB", {"step_s": 0}),
        ("small window", {"rate_mb": 4.0}, "12MiB", {"step_s": 0, "pause_s": 12}),
    ],
    ids=lambda each: each.replace(" ", "-") if isinstance(each, str) and "MiB" not in each else "",
)
def test_why_names_what_is_planted(
    s3_server: SeaweedFS, tmp_path: Path, cause: str, link: dict[str, float], ram: str, job: dict[str, float]
) -> None:
    uri = put(s3_server, cause)
    options = ["--ram", ram, "--extent-bytes", str(EXTENT), "--fillers", "1", "--allow", uri]
    with (
        ProxyProcess(s3_server.endpoint, **link) as proxy,
        Daemon(tmp_path / "node", options, s3_server.env(proxy.endpoint)) as daemon,
    ):
        said = told({"uri": uri, "options": TOKENS, **job}, daemon.env, {cause})
    # A first epoch is limited by the link, and between its pauses a job may have all that it needs.
    early = BEFORE | ({"full link", "decoding", "few workers"} if cause.startswith("small") else set())
    assert set(said) <= early | {cause}, said


@pytest.mark.slow
def test_why_names_a_slow_disk(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    rng = np.random.default_rng(0)
    (tmp_path / "data/tokens.bin").write_bytes(rng.integers(0, 256, DATA_BYTES, np.uint8).tobytes())
    with FaultyDisk(tmp_path) as disk:
        options = [
            "--ram",
            "1MiB",
            "--nvme",
            f"{disk.path}=64MiB",
            "--extent-bytes",
            str(EXTENT),
            "--fillers",
            "1",
        ]
        with Daemon(tmp_path / "node", [*options, "--allow", str(tmp_path / "data")]) as daemon:
            verb = [
                sys.executable,
                "-m",
                "cachesvc",
                "prefetch",
                str(tmp_path / "data"),
                "--format",
                "tokens",
            ]
            words = ["--dtype", "uint8", "--seq-len", "4096"]
            subprocess.run([*verb, *words], env={**os.environ, **daemon.env}, check=True, capture_output=True)
            disk.behave("read 0.05")
            job = {"uri": str(tmp_path / "data"), "options": TOKENS, "step_s": 0}
            said = told(job, daemon.env, {"slow disk"})
    assert set(said) <= BEFORE | {"slow disk"}, said


@pytest.mark.slow
def test_why_names_a_throttled_node(s3_server: SeaweedFS, tmp_path: Path) -> None:
    def options(cluster: Cluster, node: Node) -> Sequence[str]:
        slow = ["--peer-bandwidth", "512KiB"] if node.name == "n2" else []
        return [*by_file(cluster, node), *slow]

    with Cluster(
        tmp_path, nodes=3, ram=9 * MIB, extent_bytes=EXTENT, options=options, server=s3_server
    ) as cluster:
        cluster.wait_settled()
        records = cluster.source.fill(extents=96, extent_bytes=EXTENT)
        cluster.prefetch(cluster.nodes, records)
        given = {"format": "records", "record_bytes": EXTENT, "extent_bytes": EXTENT}
        job = {"uri": records.uri, "options": given, "step_s": 0}
        said = told(job, cluster.nodes[0].env, {"slow node"})
    assert set(said) <= BEFORE | {"slow node", "network"}, said
