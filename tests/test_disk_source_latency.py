"""While a disk is left alone, reads go on at no worse than twice the source's latency."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import pytest

from bench.node import Daemon
from cachesvc.client import Control
from cachesvc.grants import Granted
from cachesvc.leases import DaemonGrants
from cachesvc.sources.s3 import S3Settings, open_s3
from tests.faulty_disk import FaultyDisk
from tests.servers import Proxy, SeaweedFS
from tests.test_daemon import wait_until
from tests.test_daemon_disks import EXTENT, EXTENTS, LOST_S, RECORDS

LATENCY_S = 0.1


def timed(call: Callable[[], bytes]) -> tuple[float, bytes]:
    began = time.perf_counter()
    found = call()
    return time.perf_counter() - began, found


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["eio", "5", "3600"], ids=["eio", "answers in 5 s", "hangs"])
def test_reads_beside_a_lost_disk_take_at_most_twice_what_the_source_takes(
    tmp_path: Path, s3_server: SeaweedFS, s3_env: dict[str, str], bucket: str, fault: str
) -> None:
    body, uri = os.urandom(EXTENTS * EXTENT), f"s3://{bucket}/d/0.bin"
    s3_server.client().put_object(Bucket=bucket, Key="d/0.bin", Body=body)
    options = [
        "--extent-bytes",
        str(EXTENT),
        "--allow",
        f"s3://{bucket}/",
        "--ram",
        str(EXTENTS // 2 * EXTENT),
    ]
    with Proxy(s3_server.endpoint, LATENCY_S) as proxy, FaultyDisk(tmp_path) as disk:
        credentials = {**s3_env, "AWS_ENDPOINT_URL": proxy.endpoint}
        options += ["--nvme", f"{disk.path}={EXTENTS * EXTENT}"]
        with Daemon(tmp_path / "node", options, credentials) as daemon, Control(daemon.socket_dir) as control:
            dataset = control.open_dataset([f"s3://{bucket}/d/"], RECORDS).id
            assert list(control.prefetch(dataset))[-1].done
            grants = DaemonGrants(daemon.socket_dir, dataset)
            source = open_s3(S3Settings(endpoint=proxy.endpoint))
            version = source.head(uri)

            def granted(index: int) -> bytes:
                (answer,) = grants.acquire([index], LOST_S + 15.0)
                assert isinstance(answer, Granted)
                assert answer.origin == "ram"
                found = os.pread(answer.fd, EXTENT, 0)
                os.close(answer.fd)
                grants.release([index])
                return found

            def read(index: int) -> bytes:
                into = bytearray(EXTENT)
                source.read_into(version, index * EXTENT, memoryview(into))
                return bytes(into)

            disk.behave(fault)
            wait_until(lambda: any(tier.lost for tier in control.status().tiers), LOST_S)
            control.evict(dataset)
            ours, theirs = [], []
            for index in range(EXTENTS):  # in turns, so that both meet the same machine
                for call, times in ((granted, ours), (read, theirs)):
                    took_s, found = timed(lambda call=call, index=index: call(index))  # type: ignore[misc]
                    assert found == body[index * EXTENT : (index + 1) * EXTENT]
                    times.append(took_s)
            grants.close()
            source.close()
            disk.end()
    assert median(theirs) >= LATENCY_S
    assert median(ours) <= 2 * median(theirs), (median(ours), median(theirs))
