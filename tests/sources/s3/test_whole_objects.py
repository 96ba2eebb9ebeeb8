"""Bits that flip on the way in an object that is read by ranges, over plain HTTP: it is compared with what its server
says of it or of its parts, once all of it is there."""

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

from cachesvc.catalog.build import Options
from cachesvc.client.control import Control
from cachesvc.core.errors import CorruptData, SourceChanged, SourceUnavailable
from cachesvc.core.model import ObjectVersion, Piece
from cachesvc.sources.fetch import PART_BYTES
from cachesvc.sources.resilient import Resilience, Resilient
from cachesvc.sources.s3.parts import UNTOLD
from cachesvc.sources.s3.s3 import S3Settings, S3Source, open_s3
from loader import DataLoader, open_dataset
from testbed.node import Daemon
from testbed.servers import Fault, Proxy, SeaweedFS
from tests.support.faults.fake_s3 import FakeS3, Object
from tests.support.faults.multipart import DATA, FLIPPED, PART, composite, crc32, fetched, upload
from tests.support.waiting import wait_until

MD5 = hashlib.md5(DATA).hexdigest()


def read(fake: FakeS3) -> int:
    """How often a range was read as the fetch cuts DATA; not as what was no part of that size."""
    cuts = {f"bytes={at}-{min(at + PART, len(DATA)) - 1}" for at in range(0, len(DATA), PART)}
    return sum(each in cuts for each in fake.ranges)


def put(
    fake: FakeS3, data: bytes, etag: str = MD5, parts: list[int] | None = None, **headers: str
) -> ObjectVersion:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    fake.objects["x"] = Object(len(data), etag, data, named, parts or [])
    return ObjectVersion("s3://bucket/x", len(data), etag)


@pytest.mark.parametrize("codec", ["", "zstd"])
def test_a_bit_flipped_in_a_range_is_seen_and_the_object_read_again(
    s3_env: dict[str, str], s3_server: SeaweedFS, bucket: str, proxy: Proxy, target: int, codec: str
) -> None:
    body = zstandard.ZstdCompressor().compress(DATA) if codec else DATA
    s3_server.client().put_object(Bucket=bucket, Key="x", Body=body)
    patient = Resilient(open_s3(S3Settings(endpoint=proxy.endpoint)), Resilience(hedge=False))
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
    source = open_s3(S3Settings(endpoint=proxy.endpoint))
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


def test_what_is_stored_wrong_is_corrupt_on_a_server_whose_tags_are_md5(
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
def test_a_part_of_an_object_is_not_asked_about(
    fake: FakeS3, source: S3Source, target: int, piece: tuple[int, int]
) -> None:
    offset, length = piece
    assert fetched(source, Piece(put(fake, DATA), *piece), target) == DATA[offset : offset + length]
    assert fake.requests == len(fake.ranges) == 4


@pytest.mark.parametrize("stated", ["crc32", ""])
def test_a_bit_flipped_in_an_object_of_several_parts_is_seen(
    s3_env: dict[str, str], s3_server: SeaweedFS, bucket: str, proxy: Proxy, target: int, stated: str
) -> None:
    data = os.urandom((13 << 20) + 3)
    upload(s3_server, bucket, data, 5 << 20, stated)
    patient = Resilient(open_s3(S3Settings(endpoint=proxy.endpoint)), Resilience(hedge=False))
    version = patient.head(f"s3://{bucket}/x")
    assert version.etag.endswith(f"-{-(-len(data) // (5 << 20))}")
    proxy.faults.append(Fault("flip", after_bytes=99_999))
    assert fetched(patient, Piece(version, 0, len(data)), target, PART_BYTES) == data
    assert patient.counters.retries == 1
    patient.close()
    heads = [each for each in proxy.counts.by if each.startswith("HEAD")]
    assert any("partNumber=2" in each for each in heads)


@pytest.mark.parametrize(
    "parts", [[100_000], [60_000, 40_000], [50_000, 50_000], [30_000, 30_000, 30_000, 10_000]]
)
@pytest.mark.parametrize("by_crc", [True, False])
def test_what_parts_say_is_compared_as_they_were_uploaded(
    fake: FakeS3, source: S3Source, target: int, parts: list[int], by_crc: bool
) -> None:
    tag, crc = composite(parts)
    said = {"x_amz_checksum_crc32": crc, "x_amz_checksum_type": "COMPOSITE"} if by_crc else {}
    version = put(fake, DATA, tag, parts, **said)
    assert fetched(source, Piece(version, 0, len(DATA)), target) == DATA
    assert read(fake) == 4
    sound = fake.objects["x"]

    def mended(handler: BaseHTTPRequestHandler) -> None:
        if read(fake) == 8:
            fake.objects["x"] = sound

    put(fake, FLIPPED, tag, parts, **said)
    fake.refuse = mended
    assert fetched(source, Piece(version, 0, len(DATA)), target) == DATA
    assert read(fake) == 12


@pytest.mark.parametrize(
    ("parts", "told", "readings"),
    [
        ([40_000, 30_000, 30_000], True, 1),  # the first two tell
        ([20_000, 20_000, 10_000, 20_000, 20_000, 10_000], True, 1),  # their count tells
        ([30_000, 30_000, 20_000, 20_000], False, 1),  # a server that does not say
        ([30_000, 30_000, 25_000, 15_000], True, 2),  # in the middle: only that nothing fits
    ],
)
def test_parts_of_several_sizes_are_read_as_they_come(
    fake: FakeS3, source: S3Source, target: int, parts: list[int], told: bool, readings: int
) -> None:
    assert fetched(source, Piece(put(fake, DATA), 0, len(DATA)), target) == DATA
    version = put(fake, DATA, composite(parts)[0], parts if told else [])
    assert fetched(source, Piece(version, 0, len(DATA)), target) == DATA
    assert read(fake) == 4 * (1 + readings)


def test_parts_of_several_sizes_are_read_twice_once_and_keep_nothing_else_from_being_compared(
    fake: FakeS3, source: S3Source, target: int
) -> None:
    odd = [30_000, 30_000, 25_000, 15_000]
    for readings in (2, 3, 4):
        version = put(fake, DATA, composite(odd)[0], odd)
        assert fetched(source, Piece(version, 0, len(DATA)), target) == DATA
        assert read(fake) == 4 * readings
    fake.objects["y"] = Object(len(DATA), MD5, FLIPPED, {"x-amz-checksum-crc32": crc32(DATA)})
    with pytest.raises(CorruptData, match="its own crc32"):
        fetched(source, Piece(ObjectVersion("s3://bucket/y", len(DATA), MD5), 0, len(DATA)), target)


@pytest.mark.parametrize("parts", [[100_000], [60_000, 40_000]])
def test_what_was_stored_wrong_in_parts_of_known_sizes_is_corrupt(
    fake: FakeS3, source: S3Source, target: int, parts: list[int]
) -> None:
    tag, crc = composite(parts)
    version = put(fake, FLIPPED, tag, parts, x_amz_checksum_crc32=crc)
    with pytest.raises(CorruptData, match="its own crc32"):
        fetched(source, Piece(version, 0, len(DATA)), target)


def test_a_bit_flipped_in_an_object_of_one_part_is_seen_in_one_answer(
    fake: FakeS3, source: S3Source, target: int
) -> None:
    tag, crc = composite([len(DATA)])
    version = put(fake, FLIPPED, tag, x_amz_checksum_crc32=crc)
    with pytest.raises(SourceUnavailable, match="its crc32 differs"):
        fetched(source, Piece(version, 0, len(DATA)), target, len(DATA))
    put(fake, DATA, tag, x_amz_checksum_crc32=crc)
    assert fetched(source, Piece(version, 0, len(DATA)), target, len(DATA)) == DATA


@pytest.mark.parametrize("part_bytes", [PART, 2 * len(DATA)])
def test_a_checksum_of_parts_that_does_not_say_so_is_not_taken_for_the_bytes(
    fake: FakeS3, source: S3Source, target: int, part_bytes: int
) -> None:
    parts = [60_000, 40_000]
    tag, crc = composite(parts)
    version = put(fake, DATA, tag, parts, x_amz_checksum_crc32=crc.partition("-")[0])
    assert fetched(source, Piece(version, 0, len(DATA)), target, part_bytes) == DATA


@pytest.mark.parametrize("answer", [200, 400, 403, 404, 405, 412, 416, 500, 501])
def test_a_server_that_says_nothing_of_parts_is_believed_and_soon_not_asked(
    fake: FakeS3, source: S3Source, target: int, answer: int
) -> None:
    asked = []

    def refuse(handler: BaseHTTPRequestHandler) -> tuple[int, str] | None:
        if "partNumber" not in handler.path:
            return None
        asked.append((handler.command, handler.path))
        return None if answer == 200 else (answer, "Refused")

    fake.refuse = refuse
    version = put(fake, DATA, composite([60_000, 40_000])[0])
    patient = Resilient(source, Resilience(hedge=False))
    for _ in range(UNTOLD + 2):
        assert fetched(patient, Piece(version, 0, len(DATA)), target) == DATA
    heads = [path for command, path in asked if command == "HEAD"]
    assert len(set(heads)) == 1
    assert UNTOLD <= len(heads) <= UNTOLD * 5  # botocore's own tries of a 500
    assert len(asked) - len(heads) <= (UNTOLD**3 if answer == 500 else 1)  # the last range, as what it may be
    assert read(fake) == 4 * (UNTOLD + 2)


def test_a_server_that_asks_for_fewer_requests_is_asked_again(
    fake: FakeS3, source: S3Source, target: int
) -> None:
    fake.refuse = lambda handler: (503, "SlowDown") if "partNumber" in handler.path else None
    version = put(fake, DATA, composite([60_000, 40_000])[0])
    with pytest.raises(SourceUnavailable, match="503") as raised:
        fetched(source, Piece(version, 0, len(DATA)), target)
    assert raised.value.throttled


def test_what_a_key_of_the_users_encrypts_has_no_md5(fake: FakeS3, source: S3Source, target: int) -> None:
    assert fetched(source, Piece(put(fake, DATA), 0, len(DATA)), target) == DATA
    version = put(fake, DATA, "1" * 32, x_amz_server_side_encryption="aws:kms")
    assert fetched(source, Piece(version, 0, len(DATA)), target) == DATA
    assert read(fake) == 8


def test_an_object_overwritten_before_it_is_compared_has_changed(
    fake: FakeS3, source: S3Source, target: int
) -> None:
    def refuse(handler: BaseHTTPRequestHandler) -> None:
        if handler.command == "HEAD":
            put(fake, DATA[::-1], hashlib.md5(DATA[::-1]).hexdigest())

    version, fake.refuse = put(fake, DATA), refuse
    with pytest.raises(SourceChanged, match="overwritten"):
        fetched(source, Piece(version, 0, len(DATA)), target)


def test_under_a_daemon_no_flipped_bit_of_a_large_object_is_read(
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
