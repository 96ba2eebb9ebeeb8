"""A real daemon process, a real S3 server behind a counting proxy, real readers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from cachesvc.catalog.options import Options
from cachesvc.client.control import Control, DatasetInfo
from cachesvc.client.grants import DaemonGrants
from cachesvc.client.keepalive import EVERY_S, stop_polling
from cachesvc.client.protocol import Granted
from cachesvc.core.errors import CacheError, DaemonUnavailable, OutOfSpace
from testbed import WAIT_S
from testbed.node import Daemon
from testbed.servers import Proxy, SeaweedFS
from tests.support.processes import held_memory
from tests.support.reading import contents, read_extent
from tests.support.shared_daemon import for_one_test
from tests.support.waiting import wait_until

EXTENT = 1 << 20
EXTENTS = 8
RECORDS = Options(format="records", record_bytes=4096)


@pytest.fixture(scope="module")
def shared_proxy(s3_server: SeaweedFS) -> Iterator[Proxy]:
    with Proxy(s3_server.endpoint.removeprefix("http://")) as found:
        yield found


@pytest.fixture
def proxy(shared_proxy: Proxy) -> Proxy:
    """The proxy before the server, with counters at 0."""
    shared_proxy.reset()
    return shared_proxy


@pytest.fixture(scope="module")
def allowed(s3_server: SeaweedFS) -> str:
    """The prefix that daemons may read."""
    return f"s3://{s3_server.create_bucket(f'daemon-{uuid.uuid4().hex[:8]}')}/data/"


@pytest.fixture
def uri(allowed: str) -> str:
    """A new prefix."""
    return f"{allowed}{uuid.uuid4().hex[:8]}/"


@pytest.fixture
def data(s3_server: SeaweedFS, uri: str) -> bytes:
    """The bytes of a new dataset, an object of eight extents below `uri`."""
    return put(s3_server, uri)


def put(s3: SeaweedFS, uri: str) -> bytes:
    """Store an object of random bytes, in place of one that is there."""
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    body = os.urandom(EXTENTS * EXTENT)
    s3.client().put_object(Bucket=bucket, Key=f"{prefix}0.bin", Body=body)
    return body


@pytest.fixture(scope="module")
def shared(
    tmp_path_factory: pytest.TempPathFactory, s3_server: SeaweedFS, allowed: str, shared_proxy: Proxy
) -> Iterator[Daemon]:
    options = ["--ram", "32MiB", "--allow", allowed, "--extent-bytes", str(EXTENT)]
    with Daemon(tmp_path_factory.mktemp("node"), options, s3_server.env(shared_proxy.endpoint)) as found:
        yield found


@pytest.fixture
def daemon(shared: Daemon) -> Iterator[Daemon]:
    yield from for_one_test(shared)


def opened(daemon: Daemon, uri: str) -> DatasetInfo:
    with Control(daemon.socket_dir) as control:
        return control.open_dataset([uri], RECORDS)


def gets(proxy: Proxy) -> dict[str, int]:
    return {key: count for key, count in proxy.counts.by.items() if key.startswith("GET") and "0.bin" in key}


def test_extents_are_granted_with_the_bytes_of_the_source(daemon: Daemon, uri: str, data: bytes) -> None:
    info = opened(daemon, uri)
    found = info.dataset
    assert (found.extents, found.samples, found.stored_bytes) == (
        EXTENTS,
        EXTENTS * EXTENT // 4096,
        len(data),
    )
    grants = DaemonGrants(daemon.socket_dir, info.id)
    answers = grants.acquire(range(EXTENTS), WAIT_S)
    assert b"".join(map(contents, answers)) == data
    grants.close()


def test_sixteen_readers_of_one_cold_extent_cost_one_get_a_range(
    daemon: Daemon, uri: str, data: bytes, proxy: Proxy
) -> None:
    info = opened(daemon, uri)
    proxy.reset()
    start = threading.Barrier(16)

    def read(_: int) -> bytes:
        with closing(DaemonGrants(daemon.socket_dir, info.id)) as grants:
            start.wait()
            return read_extent(grants, 3, 30.0)

    with ThreadPoolExecutor(16) as readers:
        assert set(readers.map(read, range(16))) == {data[3 * EXTENT : 4 * EXTENT]}
    counted = gets(proxy)
    assert set(counted.values()) == {1}, counted
    assert proxy.counts.bytes == EXTENT


def test_prefetch_fetches_each_byte_once_and_reports_it(
    daemon: Daemon, uri: str, data: bytes, proxy: Proxy
) -> None:
    info = opened(daemon, uri)
    proxy.reset()
    with Control(daemon.socket_dir) as control:
        for _ in range(2):
            *_, last = control.prefetch(info.id)
            assert last.done
            assert (last.resident_extents, last.resident_bytes) == (EXTENTS, len(data))
            assert last.source_bytes == proxy.counts.bytes == len(data)
        *_, checked = control.verify(info.id)
        assert (checked.checked_extents, checked.corrupt_extents) == (EXTENTS, 0)
        (listed,) = [each for each in control.list() if each.dataset.id == info.id]
        assert listed.resident_bytes == len(data)
        assert control.evict(info.id).evicted_bytes == len(data)
        wait_until(lambda: sum(tier.used_bytes for tier in control.status().tiers) == 0)


def test_the_same_data_is_the_same_version_and_changed_data_another(
    daemon: Daemon, uri: str, data: bytes, s3_server: SeaweedFS
) -> None:
    first = opened(daemon, uri)
    assert opened(daemon, uri).id == first.id
    put(s3_server, uri)
    with Control(daemon.socket_dir) as control:
        second = control.open_dataset([uri], RECORDS, refresh=True)
        assert second.id != first.id
        assert control.open_dataset([uri], RECORDS, version=first.id) == first, "kept here"
        for other in (replace(RECORDS, record_bytes=2 * RECORDS.record_bytes), RECORDS):
            version = first.id if other != RECORDS else "0" * 32
            with pytest.raises(CacheError) as caught:
                control.open_dataset([uri], other, version=version)
            assert caught.value.code == 6


def test_an_object_overwritten_after_opening_is_never_served(
    daemon: Daemon, uri: str, data: bytes, s3_server: SeaweedFS
) -> None:
    info = opened(daemon, uri)
    put(s3_server, uri)
    grants = DaemonGrants(daemon.socket_dir, info.id)
    with pytest.raises(CacheError, match=r"0\.bin") as caught:
        grants.acquire([0], WAIT_S)
    assert caught.value.code == 6
    grants.close()


def test_health_and_reflection_are_served(daemon: Daemon) -> None:
    channel = grpc.insecure_channel(f"unix:{daemon.socket_dir}/cachesvc.sock")
    checks = health_pb2_grpc.HealthStub(channel)
    answer = checks.Check(health_pb2.HealthCheckRequest(service="cachesvc.v1.Cache"))
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    assert "cachesvc.v1.Cache" in ProtoReflectionDescriptorDatabase(channel).get_services()
    channel.close()


READER = """
import sys, time
from cachesvc.core.model import DatasetId
from cachesvc.client.grants import DaemonGrants
grants = DaemonGrants(sys.argv[1], DatasetId(sys.argv[2]))
kept = grants.acquire(range(4), 30.0)
print("leased", flush=True)
time.sleep(60)
"""


def test_a_killed_reader_leaves_nothing_behind(daemon: Daemon, uri: str, data: bytes) -> None:
    info = opened(daemon, uri)
    reader = subprocess.Popen(
        [sys.executable, "-c", READER, daemon.socket_dir, info.id], stdout=subprocess.PIPE, text=True
    )
    assert reader.stdout is not None
    assert reader.stdout.readline() == "leased\n"
    with Control(daemon.socket_dir) as control:
        assert control.evict(info.id).busy_bytes >= 4 * EXTENT
        reader.send_signal(signal.SIGKILL)
        reader.wait()
        reader.stdout.close()
        wait_until(lambda: control.status().readers == 0)
        control.evict(info.id)
        wait_until(lambda: sum(tier.used_bytes for tier in control.status().tiers) == 0)
    assert daemon.process is not None
    assert not held_memory(daemon.pid)


def test_after_a_kill_nvme_is_warm_and_held_memory_counts(
    tmp_path: Path, s3_server: SeaweedFS, uri: str, data: bytes, proxy: Proxy
) -> None:
    nvme = tmp_path / "nvme"
    nvme.mkdir()
    options = ["--ram", "4MiB", "--nvme", f"{nvme}=32MiB", "--allow", uri]
    options += ["--extent-bytes", str(EXTENT)]
    with Daemon(tmp_path / "node", options, s3_server.env(proxy.endpoint)) as daemon:
        info = opened(daemon, uri)
        grants = DaemonGrants(daemon.socket_dir, info.id)
        answers = grants.acquire(range(EXTENTS), WAIT_S)
        in_ram = [a.extent for a in answers if isinstance(a, Granted) and a.origin == "ram"]
        on_nvme = [a.extent for a in answers if isinstance(a, Granted) and a.origin == "nvme"]
        assert in_ram
        assert on_nvme
        index = nvme / "cachesvc-nvme/v1/extents"
        wait_until(lambda: len(list(index.rglob("?" * 32 + ".*"))) == len(on_nvme))
        daemon.kill()
        with pytest.raises(DaemonUnavailable):
            grants.acquire([0], 5.0)
        assert b"".join(map(contents, answers)) == data  # granted descriptors stay valid
        daemon.start()
        proxy.reset()
        again = grants.acquire(on_nvme, WAIT_S)
        assert proxy.counts.bytes == 0
        for answer in again:
            assert contents(answer) == data[answer.extent * EXTENT : (answer.extent + 1) * EXTENT]
        with Control(daemon.socket_dir) as control:
            (ram,) = [tier for tier in control.status().tiers if tier.name == "ram"]
            assert ram.held_bytes >= len(in_ram) * EXTENT
            grants.close()
            wait_until(lambda: all(tier.held_bytes == 0 for tier in control.status().tiers))


def test_a_restarted_daemon_learns_what_an_idle_reader_holds(daemon: Daemon, uri: str, data: bytes) -> None:
    grants = DaemonGrants(daemon.socket_dir, opened(daemon, uri).id)
    for answer in grants.acquire(range(EXTENTS), WAIT_S):
        contents(answer)
    daemon.kill()
    daemon.start()
    with Control(daemon.socket_dir) as control:
        wait_until(lambda: control.status().tiers[0].held_bytes == EXTENTS * EXTENT)
    grants.close()


@pytest.mark.slow
def test_a_daemon_restarted_between_two_requests_is_asked_at_once(
    daemon: Daemon, uri: str, data: bytes
) -> None:
    grants = DaemonGrants(daemon.socket_dir, opened(daemon, uri).id)
    stop_polling(grants)  # as if the daemon restarted between two polls
    read_extent(grants, 0)
    daemon.kill()
    daemon.start()
    assert read_extent(grants, 1) == data[EXTENT : 2 * EXTENT]
    grants.close()


def test_a_reader_without_references_is_not_kept_connected(daemon: Daemon, uri: str, data: bytes) -> None:
    grants = DaemonGrants(daemon.socket_dir, opened(daemon, uri).id)
    grants.connect()
    with Control(daemon.socket_dir) as control:
        assert control.status().readers == 1  # also before its first request; the control client is no reader
        read_extent(grants, 0)
        assert control.status().readers == 1
        time.sleep(2 * EVERY_S)  # the keepalive has looked after it meanwhile
        del grants
        wait_until(lambda: control.status().readers == 0)


def test_sigterm_ends_cleanly_and_removes_the_sockets(daemon: Daemon, uri: str, data: bytes) -> None:
    opened(daemon, uri)
    assert daemon.stop() == 0
    assert sorted(os.listdir(daemon.socket_dir)) == ["lock"]
    assert "Traceback" not in daemon.log


def test_a_pin_survives_a_kill_until_it_is_removed(daemon: Daemon, uri: str, data: bytes) -> None:
    def pinned() -> list[str]:
        with Control(daemon.socket_dir) as control:
            return [row.dataset.id for row in control.list() if row.pinned]

    dataset = opened(daemon, uri)
    with Control(daemon.socket_dir) as control:
        control.pin(dataset.id, True)
    daemon.kill()
    daemon.start()
    wait_until(lambda: pinned() == [dataset.id])
    with Control(daemon.socket_dir) as control:
        control.pin(dataset.id, False)
    daemon.kill()
    (daemon.root / "state" / "pins.json").write_text("[not json")
    daemon.start()
    assert pinned() == []
    assert "a file of the state directory cannot be read" in daemon.log


def test_pins_that_cannot_be_read_are_not_overwritten(daemon: Daemon, uri: str, data: bytes) -> None:
    pins = daemon.root / "state" / "pins.json"
    pins.unlink(missing_ok=True)
    pins.symlink_to(pins)
    with Control(daemon.socket_dir) as control, pytest.raises(OutOfSpace, match="cannot be rewritten"):
        control.pin(opened(daemon, uri).id, True)
    assert pins.is_symlink()
    pins.unlink()
