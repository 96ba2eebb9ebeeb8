"""Reads beside a lost disk take at most twice the source's latency."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import TypeVar

import pytest

from cachesvc.catalog.options import Options
from cachesvc.client.control import Control
from cachesvc.client.grants import DaemonGrants
from cachesvc.config import SourceSection
from cachesvc.core.model import DatasetId
from cachesvc.sources.s3.s3 import open_s3
from testbed.node import Daemon
from testbed.servers import Proxy, SeaweedFS
from tests.support.faults.disks import EXTENT, EXTENTS, LOST_S, RECORDS
from tests.support.faults.faulty_disk import FaultyDisk
from tests.support.reading import contents, granted
from tests.support.waiting import wait_until

LATENCY_S = 0.1
SHARD, SHARDS, SMALL = 1 << 20, 4, 4096
STALLED_S = 6.5
"""The first probe, sent within 2 s, finds after 3 to 4.5 s that a disk hangs."""
REPLACED_S = 10.0
"""New fillers start in a second, or in several on a busy machine; the disk itself hangs forever."""


T = TypeVar("T")


def timed(call: Callable[[], T]) -> tuple[float, T]:
    began = time.perf_counter()
    found = call()
    return time.perf_counter() - began, found


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize(
    "fault",
    ["eio", "erofs", "enospc", "gone", "5", "3600"],
    ids=["eio", "read-only", "full", "directory gone", "answers in 5 s", "hangs"],
)
def test_reads_beside_a_lost_disk_take_at_most_twice_what_the_source_takes(
    tmp_path: Path, s3_server: SeaweedFS, s3_env: dict[str, str], bucket: str, fault: str
) -> None:
    body, uri = os.urandom(EXTENTS * EXTENT), f"s3://{bucket}/d/0.bin"
    s3_server.client().put_object(Bucket=bucket, Key="d/0.bin", Body=body)
    options = ["--extent-bytes", str(EXTENT), "--allow", f"s3://{bucket}/"]
    options += ["--ram", str(EXTENTS // 2 * EXTENT)]
    with Proxy(s3_server.endpoint, LATENCY_S) as proxy, FaultyDisk(tmp_path) as disk:
        credentials = {**s3_env, "AWS_ENDPOINT_URL": proxy.endpoint}
        options += ["--nvme", f"{disk.path}={EXTENTS * EXTENT}"]
        with Daemon(tmp_path / "node", options, credentials) as daemon, Control(daemon.socket_dir) as control:
            dataset = control.open_dataset([f"s3://{bucket}/d/"], RECORDS).id
            assert list(control.prefetch(dataset))[-1].done
            grants = DaemonGrants(daemon.socket_dir, dataset)
            source = open_s3(SourceSection("s3://", endpoint=proxy.endpoint))
            version = source.head(uri)

            def ours_read(index: int) -> bytes:
                answer = granted(grants, index, LOST_S + 15.0)
                assert answer.origin == "ram"
                found = contents(answer)
                grants.release([index])
                return found

            def read(index: int) -> bytes:
                into = bytearray(EXTENT)
                source.read_into(version, index * EXTENT, memoryview(into))
                return bytes(into)

            if fault == "gone":
                os.rename(disk.path / "cachesvc-nvme", disk.path / "elsewhere")
            else:
                disk.behave(fault)
            if fault != "enospc":  # a full disk is not lost, and the first fill meets the error
                wait_until(lambda: any(tier.lost for tier in control.status().tiers), LOST_S)
            control.evict(dataset)
            ours, theirs = list[float](), list[float]()
            for index in range(EXTENTS):  # alternately, so that both run under the same load
                for call, times in ((ours_read, ours), (read, theirs)):
                    took_s, found = timed(partial(call, index))
                    assert found == body[index * EXTENT : (index + 1) * EXTENT]
                    times.append(took_s)
            grants.close()
            source.close()
            disk.end()
    assert median(theirs) >= LATENCY_S
    assert median(ours) <= 2 * median(theirs), (median(ours), median(theirs))


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("disks", [1, 2], ids=["alone", "beside another"])
def test_fills_go_on_beside_a_disk_that_hangs_in_the_middle_of_a_cold_epoch_of_small_files(
    tmp_path: Path, s3_server: SeaweedFS, s3_env: dict[str, str], bucket: str, disks: int
) -> None:
    """A fill uses a thread for each small file, so four fills occupy all threads of all fillers."""
    client, body = s3_server.client(), os.urandom(SHARDS * SHARD)
    for prefix in ("first", "other"):
        client.put_object(Bucket=bucket, Key=f"{prefix}/0.bin", Body=body)
    pieces = {body[at : at + SMALL] for at in range(0, len(body), SMALL)}
    with ThreadPoolExecutor(8) as pool:
        for at in range(0, len(body), SMALL):
            key, piece = f"small/{at:08}", body[at : at + SMALL]
            pool.submit(client.put_object, Bucket=bucket, Key=key, Body=piece)
    options = ["--extent-bytes", str(SHARD), "--allow", f"s3://{bucket}/"]
    options += ["--ram", str(len(body) if disks == 1 else 0)]
    (tmp_path / "second").mkdir()
    with Proxy(s3_server.endpoint, LATENCY_S) as proxy, FaultyDisk(tmp_path) as disk:
        options += ["--nvme", f"{disk.path}=64MiB"]
        options += ["--nvme", f"{tmp_path}/second=64MiB"] if disks == 2 else []
        credentials = {**s3_env, "AWS_ENDPOINT_URL": proxy.endpoint}
        with (
            Daemon(tmp_path / "node", options, credentials) as daemon,
            Control(daemon.socket_dir) as control,
            ExitStack() as stack,
        ):
            stack.callback(
                disk.behave, ""
            )  # also after a failure: a daemon that hangs in the disk cannot be ended

            def grant(dataset: DatasetId, index: int) -> tuple[float, str]:
                """The time of a grant and its tier; checks the bytes."""
                grants = DaemonGrants(daemon.socket_dir, dataset)
                answer = granted(grants, index, 2 * LOST_S)
                at_s, found = time.monotonic(), contents(answer)
                assert {found[at : at + SMALL] for at in range(0, len(found), SMALL)} <= pieces
                grants.close()
                return at_s, answer.origin

            def lost() -> list[str]:
                return [tier.name for tier in control.status().tiers if tier.lost]

            first, other = (
                control.open_dataset([f"s3://{bucket}/{d}/"], RECORDS).id for d in ("first", "other")
            )
            small = control.open_dataset([f"s3://{bucket}/small/"], Options(format="files")).id
            assert list(control.prefetch(first))[-1].done  # RAM is full, so later fills go to the disk
            proxy.delay_s = 2.0
            with ThreadPoolExecutor(SHARDS) as readers:
                under_way = [readers.submit(grant, small, index) for index in range(SHARDS)]
                wait_until(lambda: control.status().fills_running == SHARDS)
                time.sleep(1.0)  # all extents are requested, none is filled
                disk.behave("hang")
                began = time.monotonic()
                proxy.delay_s = LATENCY_S
                at_s, origin = grant(other, 0)
                assert at_s - began < STALLED_S + REPLACED_S
                assert origin == ("ram" if disks == 1 else "nvme")
                for each in under_way:
                    assert each.result()[0] - began < STALLED_S + REPLACED_S
                wait_until(lambda: lost() == ["nvme0"], LOST_S)
            ours = [timed(partial(grant, other, index))[0] for index in range(1, SHARDS)]
            source = open_s3(SourceSection("s3://", endpoint=proxy.endpoint))
            version, into = source.head(f"s3://{bucket}/other/0.bin"), memoryview(bytearray(SHARD))
            theirs = []
            for index in range(SHARDS):
                began = time.perf_counter()
                source.read_into(version, index * SHARD, into)
                theirs.append(time.perf_counter() - began)
            source.close()
            assert lost() == ["nvme0"]
            assert median(ours) <= 2 * median(theirs), (ours, theirs)
            assert control.status().fills_running == 0
