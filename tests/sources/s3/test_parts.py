"""Bits that flip on the way in objects that no extent holds whole, over plain HTTP: S3 states checksums of their parts."""

from __future__ import annotations

import logging
import os
from http.server import BaseHTTPRequestHandler

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachesvc.core.errors import SourceUnavailable
from cachesvc.core.model import ObjectVersion, Piece
from cachesvc.sources.fetch import PART_BYTES
from cachesvc.sources.resilient import Resilience, Resilient
from cachesvc.sources.s3.parts import UNTOLD, Parts, part_at
from cachesvc.sources.s3.s3 import S3Settings, S3Source, open_s3
from testbed.servers import Proxy, SeaweedFS
from tests.support.faults.fake_s3 import FakeS3, Object
from tests.support.faults.multipart import DATA, FLIPPED, PART, composite, crc32, fetched, upload

PARTS = [30_000, 30_000, 30_000, 10_000]
BEGINS = (0, 30_000, 60_000, 90_000)


def put(fake: FakeS3, data: bytes, name: str = "x", sums: list[str] | None = None) -> ObjectVersion:
    """An object in PARTS of DATA, whose checksums are stated; what is sent is `data`."""
    tag, crc = composite(PARTS)
    stated = [crc32(DATA[at : at + PART]) for at in BEGINS] if sums is None else sums
    fake.objects[name] = Object(len(data), tag, data, {"x-amz-checksum-crc32": crc}, PARTS, stated)
    return ObjectVersion(f"s3://bucket/{name}", len(data), tag)


@given(st.integers(1, 1 << 40), st.integers(2, 10_000), st.data())
def test_a_range_is_a_part_exactly_where_parts_of_its_size_make_the_object(
    part_bytes: int, count: int, data: st.DataObject
) -> None:
    size = part_bytes * (count - 1) + data.draw(st.integers(1, part_bytes))
    version = ObjectVersion("s3://bucket/x", size, f"{'0' * 32}-{count}")
    number = data.draw(st.integers(1, count))
    offset = (number - 1) * part_bytes
    length = min(part_bytes, size - offset)
    assert part_at(version, offset, length) == number
    assert part_at(ObjectVersion("s3://bucket/x", size, "0" * 32), offset, length) == 0
    if length > 1 and number < count:
        assert part_at(version, offset, length - 1) in (0, (number - 1) * part_bytes // (length - 1) + 1)
        assert part_at(version, offset + 1, length) == 0


@pytest.mark.parametrize("begin", [0, 60_000])
def test_a_bit_flipped_in_a_part_is_seen_and_the_part_read_again(
    fake: FakeS3, source: S3Source, target: int, begin: int
) -> None:
    version = put(fake, FLIPPED)
    piece = Piece(version, begin, min(90_000, len(DATA) - begin))  # not all of the object
    with pytest.raises(SourceUnavailable, match="part 3 of s3://bucket/x arrived damaged: its crc32 differs"):
        fetched(source, piece, target)
    patient = Resilient(source, Resilience(hedge=False))
    sent = 0

    def mended(handler: BaseHTTPRequestHandler) -> None:
        nonlocal sent
        sent += "partNumber=3" in handler.path
        if sent == 2:
            fake.objects["x"].data = DATA

    fake.objects["x"].data = bytes([*DATA[:88_888], DATA[88_888] ^ 1, *DATA[88_889:]])
    fake.refuse = mended
    assert fetched(patient, piece, target) == DATA[begin:][: piece.length]
    assert patient.counters.retries == 1


def test_the_last_part_is_one_too(fake: FakeS3, source: S3Source, target: int) -> None:
    version = put(fake, DATA[:95_000] + bytes([DATA[95_000] ^ 8]) + DATA[95_001:])
    with pytest.raises(SourceUnavailable, match="part 4 of s3://bucket/x arrived damaged"):
        fetched(source, Piece(version, 90_000, 10_000), target)


@pytest.mark.parametrize("answer", [200, 206, 400, 403, 404, 405, 412, 416, 501])
def test_a_server_that_gives_no_part_is_asked_for_the_range(
    fake: FakeS3, source: S3Source, target: int, answer: int
) -> None:
    """200: all of the object, by who does not know of parts; 206: other parts than those of one size."""
    asked = []

    def refuse(handler: BaseHTTPRequestHandler) -> tuple[int, str] | None:
        if "partNumber" not in handler.path:
            return None
        asked.append(handler.path)
        return None if answer in (200, 206) else (answer, "Refused")

    fake.refuse = refuse
    for number in range(UNTOLD + 2):
        version = put(fake, DATA, f"{number}")
        fake.objects[f"{number}"].parts = [40_000, 20_000, 30_000, 10_000] if answer == 206 else []
        for begin in BEGINS[:2]:
            assert fetched(source, Piece(version, begin, PART), target) == DATA[begin:][:PART]
    assert len(asked) == UNTOLD


def test_a_server_that_fails_over_parts_alone_is_asked_for_ranges_in_the_end(
    fake: FakeS3, source: S3Source, target: int
) -> None:
    asked = []

    def refuse(handler: BaseHTTPRequestHandler) -> tuple[int, str] | None:
        asked.extend([handler.path] * ("partNumber" in handler.path))
        return (500, "InternalError") if "partNumber" in handler.path else None

    fake.refuse = refuse
    patient = Resilient(source, Resilience(hedge=False))
    for number in range(UNTOLD**2 + 2):
        version = put(fake, DATA, f"{number}")
        assert fetched(patient, Piece(version, 0, PART), target) == DATA[:PART]
    assert len(asked) == UNTOLD**3


def named(name: object) -> ObjectVersion:
    return ObjectVersion(f"s3://bucket/{name}", 1, "tag")


def test_parts_are_asked_for_until_ranges_show_often_that_they_alone_fail() -> None:
    parts, first = Parts(), named("first")

    def ranges(count: int, failures: int, given: bool) -> bool:
        """Whether parts are asked for after so many ranges, each of which followed so many failures."""
        for _ in range(count):
            for _ in range(failures):
                parts.failed(first)
            parts.ranged(first, given)
        return parts.worth_asking(named("other"))

    for number in range(UNTOLD):
        assert parts.worth_asking(first), number
        parts.failed(first)
    assert not parts.worth_asking(first)
    assert parts.worth_asking(named("other"))
    parts.ranged(first, False)
    assert parts.worth_asking(first), "its range was not given either"
    assert ranges(UNTOLD**2, UNTOLD, given=False), "that says nothing of parts"
    assert ranges(UNTOLD**2, UNTOLD - 1, given=True), "nor what was not asked for again"
    assert ranges(UNTOLD**2 - 1, UNTOLD, given=True)
    parts.told(first, True)
    assert ranges(UNTOLD**2 - 1, UNTOLD, given=True), "a part was given between"
    assert not ranges(1, UNTOLD, given=True)


def test_a_part_that_is_given_ends_what_was_counted_before() -> None:
    parts = Parts()
    for stated in (False, True):
        for number in range(UNTOLD - 1):
            parts.failed(named("given"))
            parts.told(named((stated, number)), False)
        parts.told(named("given"), True)
    assert parts.worth_asking(named("given"))
    parts.told(named("last"), False)
    assert parts.worth_asking(named("given"))
    assert not parts.worth_asking(named("last"))


TROUBLE = [(500, "InternalError"), (502, ""), (400, "ExpiredToken")]


@pytest.mark.parametrize("failure", TROUBLE, ids=str)
@pytest.mark.parametrize("times", [1, UNTOLD])
def test_trouble_of_a_moment_ends_no_check_of_parts(
    fake: FakeS3,
    source: S3Source,
    target: int,
    monkeypatch: pytest.MonkeyPatch,
    failure: tuple[int, str],
    times: int,
) -> None:
    """Whether a first request fails, or all of a short while."""
    failed: dict[str, int] = {}

    def refuse(handler: BaseHTTPRequestHandler) -> tuple[int, str] | None:
        name = handler.path.partition("?")[0]
        failed[name] = failed.get(name, 0) + 1
        return failure if failed[name] <= times else None

    fake.refuse = refuse
    monkeypatch.setattr(source._identity, "renewed", lambda used: True)
    patient = Resilient(source, Resilience(hedge=False))
    for number in range(2 * UNTOLD):
        version = put(fake, DATA, f"{number}")
        assert fetched(patient, Piece(version, 0, PART), target) == DATA[:PART]
    fake.refuse = lambda handler: None
    for number in range(2 * UNTOLD):
        version = put(fake, FLIPPED, f"flipped{number}")
        with pytest.raises(SourceUnavailable, match="arrived damaged"):
            fetched(source, Piece(version, 60_000, 30_000), target)


def test_a_server_that_states_nothing_of_parts_is_soon_asked_for_ranges(
    fake: FakeS3, source: S3Source, target: int
) -> None:
    for number in range(UNTOLD + 2):
        version = put(fake, DATA, f"{number}", sums=[])
        for begin in BEGINS[:2]:
            assert fetched(source, Piece(version, begin, PART), target) == DATA[begin:][:PART]
    assert fake.requests == 2 * (UNTOLD + 2)


def test_a_server_that_states_something_else_is_asked_twice_and_believed_no_more(
    fake: FakeS3, source: S3Source, target: int, caplog: pytest.LogCaptureFixture
) -> None:
    """MinIO once stated the object's checksum of each part."""
    patient = Resilient(source, Resilience(hedge=False))
    with caplog.at_level(logging.WARNING):
        for number in range(UNTOLD + 2):
            version = put(fake, DATA, f"{number}", sums=[crc32(DATA)] * 4)
            for begin in BEGINS[:2]:
                assert fetched(patient, Piece(version, begin, PART), target) == DATA[begin:][:PART]
    assert fake.requests == 2 * (UNTOLD + 2) + UNTOLD
    assert [record.message for record in caplog.records if "as it comes" in record.message] == [
        "part 1 of s3://bucket/0 is not what the crc32 of parts says: it is read as it comes"
    ]


@pytest.mark.parametrize("stated", ["crc32", ""])
def test_parts_of_a_real_server_are_read_right(
    s3_env: dict[str, str], s3_server: SeaweedFS, bucket: str, proxy: Proxy, target: int, stated: str
) -> None:
    data = os.urandom(2 * PART_BYTES + 5)
    upload(s3_server, bucket, data, PART_BYTES, stated)
    source = open_s3(S3Settings(endpoint=proxy.endpoint))
    version = source.head(f"s3://{bucket}/x")
    for piece in (Piece(version, 0, 2 * PART_BYTES), Piece(version, 2 * PART_BYTES, 5)):
        assert fetched(source, piece, target, PART_BYTES) == data[piece.offset :][: piece.length]
    source.close()
    assert any("partNumber=" in each for each in proxy.counts.by if each.startswith("GET"))
