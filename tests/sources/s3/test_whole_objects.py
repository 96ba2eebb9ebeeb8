"""Whole objects read by ranges over plain HTTP are compared with the checksum or MD5 that their server states."""

from __future__ import annotations

import base64
import hashlib
import os
import zlib
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import numpy as np
import pytest
import zstandard

from cachesvc.catalog.options import Options
from cachesvc.client.control import Control
from cachesvc.config import SourceSection
from cachesvc.core.errors import CorruptData, SourceChanged, SourceUnavailable
from cachesvc.core.model import ObjectVersion, Piece, extent_of
from cachesvc.sources.fetch import PART_BYTES, Fetcher
from cachesvc.sources.resilient import Resilience, Resilient
from cachesvc.sources.s3.s3 import S3Source, open_s3
from loader import DataLoader, open_dataset
from testbed.node import Daemon
from testbed.servers import Fault, Proxy, SeaweedFS
from tests.support.faults.fake_s3 import FakeS3, Object
from tests.support.waiting import wait_until

DATA = os.urandom(100_000)
MD5 = hashlib.md5(DATA).hexdigest()
FLIPPED = DATA[:77_777] + bytes([DATA[77_777] ^ 4]) + DATA[77_778:]
PART = 30_000


def put(fake: FakeS3, data: bytes, etag: str = MD5, **headers: str) -> ObjectVersion:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    fake.objects["x"] = Object(len(data), etag, data, named)
    return ObjectVersion("s3://bucket/x", len(data), etag)


def fetched(source: S3Source | Resilient, piece: Piece, target: int) -> bytes:
    """Fetch one piece by ranges of PART, and return what was written."""
    fetcher = Fetcher(lambda _: source, threads=4, part_bytes=PART)
    try:
        fetcher.fetch(extent_of([piece]), target)
    finally:
        fetcher.close()
    return os.pread(target, piece.length, 0)


@pytest.mark.parametrize("codec", ["", "zstd"])
def test_a_bit_flipped_in_a_range_is_seen_and_the_object_read_again(
    s3_env: dict[str, str], s3_server: SeaweedFS, bucket: str, proxy: Proxy, target: int, codec: str
) -> None:
    body = zstandard.ZstdCompressor().compress(DATA) if codec else DATA
    s3_server.client().put_object(Bucket=bucket, Key="x", Body=body)
    patient = Resilient(open_s3(SourceSection("s3://", endpoint=proxy.endpoint)), Resilience(hedge=False))
    piece = Piece(patient.head(f"s3://{bucket}/x"), 0, len(DATA), codec)
    proxy.faults.append(Fault("flip", after_bytes=9_999))
    assert fetched(patient, piece, target) == DATA
    patient.close()
    ranges = -(-len(body) // PART)
    assert (patient.counters.retries, patient.counters.requests) == (1, 2 * ranges)
    assert sum(count for each, count in proxy.counts.by.items() if each.startswith("HEAD")) == 2


def test_bits_that_flip_each_time_are_never_taken(
    s3_env: dict[str, str], s3_server: SeaweedFS, bucket: str, proxy: Proxy, target: int
) -> None:
    s3_server.client().put_object(Bucket=bucket, Key="x", Body=DATA)
    source = open_s3(SourceSection("s3://", endpoint=proxy.endpoint))
    version = source.head(f"s3://{bucket}/x")
    proxy.faults += [Fault("flip", after_bytes=9, times=4), Fault("flip", after_bytes=8, times=4)]
    with pytest.raises(SourceUnavailable, match="arrived damaged"):
        fetched(source, Piece(version, 0, len(DATA)), target)
    source.close()


@pytest.mark.parametrize("name", ["crc32", "sha256"])
def test_the_checksum_that_a_head_states_is_compared_first(
    fake: FakeS3, source: S3Source, target: int, name: str
) -> None:
    crc = zlib.crc32(DATA).to_bytes(4, "big")
    stated = base64.b64encode(crc if name == "crc32" else hashlib.sha256(DATA).digest()).decode()
    version = put(fake, FLIPPED, "0" * 32, **{f"x_amz_checksum_{name}": stated})
    with pytest.raises(CorruptData, match=f"its own {name}"):
        fetched(source, Piece(version, 0, len(DATA)), target)
    assert len(fake.ranges) == 8
    put(fake, DATA, "0" * 32, **{f"x_amz_checksum_{name}": stated})
    assert fetched(source, Piece(version, 0, len(DATA)), target) == DATA


def test_an_object_uploaded_in_parts_without_such_a_checksum_costs_one_head(
    fake: FakeS3, source: S3Source, target: int
) -> None:
    version = put(fake, DATA, f"{MD5}-4")
    assert fetched(source, Piece(version, 0, len(DATA)), target) == DATA
    assert (len(fake.ranges), fake.requests) == (4, 5)


def test_an_object_stored_wrong_is_corrupt_on_a_server_with_md5_tags(
    fake: FakeS3, source: S3Source, target: int
) -> None:
    assert fetched(source, Piece(put(fake, DATA), 0, len(DATA)), target) == DATA
    with pytest.raises(CorruptData, match="its own MD5"):
        fetched(source, Piece(put(fake, FLIPPED), 0, len(DATA)), target)


def test_tags_that_look_like_md5_and_are_not_cost_one_reading_more_a_server(
    fake: FakeS3, source: S3Source, target: int
) -> None:
    version = put(fake, DATA, "0" * 32)
    for readings in (2, 3, 4):
        assert fetched(source, Piece(version, 0, len(DATA)), target) == DATA
        assert len(fake.ranges) == 4 * readings
    assert fake.requests == 4 * 4 + 1  # a HEAD


@pytest.mark.parametrize("piece", [(0, 99_999), (1, 99_999)])
def test_a_partial_object_costs_no_head(
    fake: FakeS3, source: S3Source, target: int, piece: tuple[int, int]
) -> None:
    offset, length = piece
    assert fetched(source, Piece(put(fake, DATA), *piece), target) == DATA[offset : offset + length]
    assert fake.requests == len(fake.ranges) == 4


def test_an_object_overwritten_before_its_head_has_changed(
    fake: FakeS3, source: S3Source, target: int
) -> None:
    def refuse(handler: BaseHTTPRequestHandler) -> None:
        if handler.command == "HEAD":
            put(fake, DATA[::-1], hashlib.md5(DATA[::-1]).hexdigest())

    version, fake.refuse = put(fake, DATA), refuse
    with pytest.raises(SourceChanged, match="overwritten"):
        fetched(source, Piece(version, 0, len(DATA)), target)


def test_with_a_daemon_no_flipped_bit_of_a_large_object_is_read(
    tmp_path: Path,
    s3_server: SeaweedFS,
    s3_env: dict[str, str],
    bucket: str,
    proxy: Proxy,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = np.random.default_rng(5).integers(0, 256, (2 * PART_BYTES // 4096 + 99, 4096), np.uint8)
    for name in ("0.bin", "1.bin"):
        s3_server.client().put_object(Bucket=bucket, Key=f"d/{name}", Body=rows.tobytes())
    proxy.faults += [Fault("flip", path="0.bin", after_bytes=at) for at in (5, 77)]
    options = ["--ram", "64MiB", "--fillers", "2", "--allow", f"s3://{bucket}/"]
    credentials = {**s3_env, "AWS_ENDPOINT_URL": proxy.endpoint}
    with Daemon(tmp_path / "node", options, credentials) as daemon, Control(daemon.socket_dir) as control:
        monkeypatch.setenv("CACHESVC_SOCKET", daemon.socket_dir)
        monkeypatch.setenv("CACHESVC", "require")
        dataset = control.open_dataset([f"s3://{bucket}/d/"], Options(format="records", record_bytes=4096))
        assert list(control.prefetch(dataset.id))[-1].done
        data = open_dataset(f"s3://{bucket}/d/", format="records", record_bytes=4096)
        for batch in (batches := DataLoader(data, 64, shuffle=True)):
            assert np.array_equal(batch.numpy(), rows[batches.indices % len(rows)])
        data.close()
        wait_until(lambda: control.status().sources.retries == 1)
        assert not any(fault.times for fault in proxy.faults)
