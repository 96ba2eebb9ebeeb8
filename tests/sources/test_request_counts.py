"""The daemon's counts of requests to a source equal the source's own."""

from __future__ import annotations

import os
import re
import urllib.request
from pathlib import Path

from cachesvc.catalog.options import Options
from cachesvc.client.control import Control
from testbed import WAIT_S
from testbed.node import Daemon
from testbed.servers import Fault, Proxy, SeaweedFS, free_ports
from tests.support.waiting import wait_until

EXTENT = 64 << 10
BODY = os.urandom(8 * EXTENT)
CUT = 500
"""Bytes of a response that is cut. They are kept, and only the rest is asked for."""


def test_reads_retries_and_throttles_are_counted(
    tmp_path: Path, s3_server: SeaweedFS, s3_env: dict[str, str], bucket: str, proxy: Proxy
) -> None:
    s3_server.client().put_object(Bucket=bucket, Key="d/0.bin", Body=BODY)
    proxy.faults += [
        Fault("status", path="0.bin", status=503),
        Fault("cut", path="0.bin", after_bytes=CUT),
        Fault("status", path="0.bin", status=500),
    ]
    (port,) = free_ports(1)
    options = ["--ram", "4MiB", "--extent-bytes", str(EXTENT), "--fillers", "2"]
    options += ["--allow", f"s3://{bucket}/", "--metrics", f"127.0.0.1:{port}"]
    credentials = {**s3_env, "AWS_ENDPOINT_URL": proxy.endpoint}

    def metrics() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=WAIT_S) as answer:
            told: str = answer.read().decode()
            return told

    with Daemon(tmp_path / "node", options, credentials) as daemon, Control(daemon.socket_dir) as control:
        dataset = control.open_dataset([f"s3://{bucket}/d/"], Options(format="records", record_bytes=4096))
        assert list(control.prefetch(dataset.id))[-1].done
        wait_until(lambda: control.status().sources.bytes == len(BODY))
        told = control.status().sources
        before = re.search(r'^cachesvc_failed_fills_total\{error="SourceChanged"\} 0.0$', metrics(), re.M)
        assert before, "the first could not be told from a restart"
        exposed = metrics()
        found = re.findall(r"^cachesvc_source_(\w+?)_total (\S+)$", exposed, re.M)
        gets = sum(count for each, count in proxy.counts.by.items() if each.startswith(f"GET /{bucket}/d/"))
        control.evict(dataset.id)
        s3_server.client().put_object(Bucket=bucket, Key="d/0.bin", Body=BODY[::-1])
        assert list(control.prefetch(dataset.id))[-1].failures
        assert re.search(r'^cachesvc_failed_fills_total\{error="SourceChanged"\} 8.0$', metrics(), re.M)
    assert told.requests == gets == len(BODY) // EXTENT + 3
    assert (told.retries, told.throttled, told.hedges, told.hedge_bytes) == (3, 1, 0, 0)
    seconds = re.search(r"^cachesvc_source_request_seconds_sum (\S+)$", exposed, re.M)
    assert seconds is not None
    assert float(seconds[1]) > 0
    counts = {name: float(value) for name, value in found}
    assert counts == {
        "requests": told.requests,
        "read_bytes": len(BODY),
        "retries": 3,
        "throttled": 1,
        "hedges": 0,
        "hedge_bytes": 0,
    }
