"""A daemon and its readers with a source that has all faults at once, or real sizes: a loader gets right bytes, or a typed
error that names the object."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from cachesvc.catalog.options import Options
from cachesvc.client.control import Control
from cachesvc.client.grants import DaemonGrants
from cachesvc.client.protocol import Granted
from cachesvc.config import SourceSection
from cachesvc.core.errors import NotFound, SourceUnavailable
from cachesvc.core.limits import SILENCE_S
from cachesvc.core.model import ObjectVersion
from cachesvc.sources.s3.s3 import open_s3
from loader import DataLoader, open_dataset
from testbed.node import Daemon
from testbed.servers import Fault, Proxy, SeaweedFS
from tests.support.faults.fake_s3 import FakeS3, Object, pattern
from tests.support.faults.s3_answers import ODD

EXTENT = 1 << 20
RECORD = 4096
RECORDS = Options(format="records", record_bytes=RECORD)
FAULTS = (
    Fault("status", status=503, code="SlowDown"),
    Fault("status", status=429, retry_after_s=1),
    Fault("status", status=500),
    Fault("status", status=502),
    Fault("cut", after_bytes=700),
    Fault("reset", after_bytes=700),
    Fault("length"),
    Fault("flip", after_bytes=5),
    Fault("ignore-range"),
    Fault("ignore-if-match"),
    Fault("slow", after_s=0.3),
)
"""All faults of the proxy except a stall, which has a test of its own."""


@contextlib.contextmanager
def serving(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    bucket: str,
    env: Mapping[str, str] | None = None,
    extent_bytes: int = EXTENT,
) -> Iterator[Daemon]:
    """Run a daemon that this process's loaders find; afterwards assert that its log has no traceback."""
    options = ["--ram", str(40 * EXTENT), "--extent-bytes", str(extent_bytes), "--fillers", "2"]
    with Daemon(tmp_path / "node", [*options, "--allow", f"s3://{bucket}/"], env) as daemon:
        monkeypatch.setenv("CACHESVC_SOCKET", daemon.socket_dir)
        monkeypatch.setenv("CACHESVC", "require")
        yield daemon
        assert daemon.stop() == 0
        assert "Traceback" not in daemon.log


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_an_epoch_through_every_fault_at_once_holds_no_wrong_sample(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    s3_server: SeaweedFS,
    bucket: str,
    proxy: Proxy,
    seed: int,
) -> None:
    """Objects with keys of any characters, empty, small, and one read by ranges: all bytes are right."""
    draw, client = random.Random(seed), s3_server.client()
    bodies = {f"d/{key}": draw.randbytes(draw.randrange(1, 60_000)) for key in ODD}
    small = [f"d/{number:03d}.bin" for number in range(60)]
    bodies |= {key: draw.randbytes(draw.randrange(1000, 200_000)) for key in small}
    bodies |= {"d/empty.bin": b"", "d/large.bin": draw.randbytes(9 << 20)}
    for key, body in bodies.items():
        client.put_object(Bucket=bucket, Key=key, Body=body)
    hit = [*draw.sample(small, 4 * len(FAULTS)), *["d/large.bin"] * len(FAULTS)]
    faults = [replace(fault, path=key) for fault, key in zip(5 * FAULTS, hit, strict=True)]
    with serving(tmp_path, monkeypatch, bucket, s3_server.env(proxy.endpoint), 16 * EXTENT):
        found = open_dataset(f"s3://{bucket}/d/", format="files", decode=None)
        proxy.faults += faults
        batches = DataLoader(found, batch_size=8, shuffle=True, collate_fn=list)
        read = [sample if isinstance(sample, bytes) else sample[0] for batch in batches for sample in batch]
        found.close()
    assert sorted(map(digest, read)) == sorted(map(digest, bodies.values()))
    assert not any(fault.times for fault in faults), "faults that were not met"


def digest(body: bytes) -> bytes:
    return hashlib.sha256(body).digest()


@pytest.mark.slow
def test_a_body_that_stops_is_given_up_after_30_s_where_no_second_read_is_due(
    s3_server: SeaweedFS, s3_env: dict[str, str], bucket: str, proxy: Proxy
) -> None:
    body = os.urandom(EXTENT)
    etag = s3_server.client().put_object(Bucket=bucket, Key="x", Body=body)["ETag"].strip('"')
    source, into = open_s3(SourceSection("s3://", endpoint=proxy.endpoint)), bytearray(EXTENT)
    version = ObjectVersion(f"s3://{bucket}/x", EXTENT, etag)
    proxy.faults.append(Fault("stall", after_bytes=EXTENT // 2))
    began = time.monotonic()
    with pytest.raises(SourceUnavailable, match="sent nothing for 30 s"):
        source.read_into(version, 0, memoryview(into))
    assert SILENCE_S - 1 < time.monotonic() - began < SILENCE_S + 15
    source.read_into(version, 0, memoryview(into))
    assert into == body
    source.close()


def test_what_is_cached_of_an_object_that_is_deleted_in_mid_epoch_is_served_and_the_rest_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, s3_server: SeaweedFS, bucket: str
) -> None:
    body, client = os.urandom(2 * EXTENT), s3_server.client()
    client.put_object(Bucket=bucket, Key="d/0.bin", Body=body)
    with (
        serving(tmp_path, monkeypatch, bucket, s3_server.env()) as daemon,
        Control(daemon.socket_dir) as control,
    ):
        dataset = control.open_dataset([f"s3://{bucket}/d/"], RECORDS).id
        grants = DaemonGrants(daemon.socket_dir, dataset)
        assert read(grants, 0) == body[:EXTENT]
        client.delete_object(Bucket=bucket, Key="d/0.bin")
        assert read(grants, 0) == body[:EXTENT]
        with pytest.raises(NotFound, match=r"d/0\.bin"):
            grants.acquire([1], 30.0)
        assert read(grants, 0) == body[:EXTENT]
        grants.close()


def read(grants: DaemonGrants, extent: int) -> bytes:
    (answer,) = grants.acquire([extent], 30.0)
    assert isinstance(answer, Granted)
    found = os.pread(answer.fd, answer.size_bytes, 0)
    os.close(answer.fd)
    grants.release([extent])
    return found


def test_keys_that_expire_under_a_daemon_are_asked_for_anew_and_no_read_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake: FakeS3
) -> None:
    """The keys come from a credential process, like those of SSO and Vault; the server calls them expired before their
    end."""
    said = tmp_path / "keys.json"

    def give(key: str) -> None:
        given = {"AccessKeyId": key, "SecretAccessKey": "s", "SessionToken": "t"}
        said.write_text(json.dumps({"Version": 1, "Expiration": "2099-01-01T00:00:00Z"} | given))
        accepted.append(key)

    def refuse(handler: BaseHTTPRequestHandler) -> tuple[int, str] | None:
        fine = f"Credential={accepted[-1]}/" in handler.headers.get("Authorization", "")
        return None if fine else (400, "ExpiredToken")

    accepted: list[str] = []
    give("first")
    fake.refuse = refuse
    fake.objects["d/0.bin"] = Object(8 * EXTENT)
    program = f"{sys.executable} -c 'print(open(\"{said}\").read())'"
    (tmp_path / "config").write_text(f"[default]\ncredential_process = {program}\n")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_ENDPOINT_URL", fake.endpoint)
    with (
        serving(tmp_path, monkeypatch, "b") as daemon,
        Control(daemon.socket_dir) as control,
    ):
        dataset = control.open_dataset(["s3://b/d/"], RECORDS).id
        grants = DaemonGrants(daemon.socket_dir, dataset)
        for extent in range(8):
            if extent in (2, 5):
                give(f"since {extent}".replace(" ", ""))
            assert read(grants, extent) == pattern(extent * EXTENT, EXTENT)
        grants.close()


@pytest.mark.slow
def test_an_object_of_50_gb_is_a_dataset_and_costs_what_is_read_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake: FakeS3
) -> None:
    size = 50 * 10**9 // RECORD * RECORD
    fake.objects["d/0.bin"] = Object(size, "e-6000")
    beyond_4_gib = (4 << 30) // RECORD
    with serving(tmp_path, monkeypatch, "b", {"AWS_ENDPOINT_URL": fake.endpoint}):
        found = open_dataset("s3://b/d/", format="records", record_bytes=RECORD)
        assert len(found) == size // RECORD
        samples = (0, beyond_4_gib - 1, beyond_4_gib, 47 * 10**9 // RECORD, len(found) - 1)
        for sample in samples:
            assert found[sample].numpy().tobytes() == pattern(sample * RECORD, RECORD)
        found.close()
    spans = [tuple(map(int, span.removeprefix("bytes=").split("-"))) for span in fake.ranges]
    assert sum(last - first + 1 for first, last in spans) <= len(samples) * EXTENT


@pytest.mark.slow
def test_a_prefix_of_100_000_keys_is_a_dataset_and_costs_a_hundred_listings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake: FakeS3
) -> None:
    count = 100_000
    fake.objects = {f"d/{number:06}.bin": Object(number % 1000, f"e{number}-2") for number in range(count)}
    with serving(tmp_path, monkeypatch, "b", {"AWS_ENDPOINT_URL": fake.endpoint}):
        found = open_dataset("s3://b/d/", format="files", decode=None)
        assert len(found) == count
        assert fake.requests <= count / 1000 + 2
        for sample in (0, 1, 50_000, 77_777, count - 1):
            number = int(found.opened.catalog.key(sample).removesuffix(".bin"))
            assert found[sample] == pattern(0, number % 1000)
        found.close()
