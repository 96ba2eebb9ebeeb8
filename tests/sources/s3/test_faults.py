"""Faults between the daemon and an S3 server, made by a proxy before a real server."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from cachesvc.config import SourceSection
from cachesvc.core.errors import CacheError, NotAllowed, NotFound, SourceChanged, SourceUnavailable
from cachesvc.core.model import ObjectVersion
from cachesvc.core.rates.backoff import LATENCY_SAMPLES, LEAST_LATE_S
from cachesvc.sources.open import Sources, SourceSettings
from cachesvc.sources.resilient import Resilience, Resilient
from cachesvc.sources.s3.s3 import S3Source, open_s3
from testbed import WAIT_S
from testbed.servers import Fault, Proxy, SeaweedFS
from tests.support.clock import Clock
from tests.support.faults.s3_answers import ODD
from tests.support.reads import read
from tests.support.waiting import wait_until

DATA = os.urandom(1 << 20)


@pytest.fixture
def version(s3_server: SeaweedFS, bucket: str) -> ObjectVersion:
    etag = s3_server.client().put_object(Bucket=bucket, Key="x", Body=DATA)["ETag"].strip('"')
    return ObjectVersion(f"s3://{bucket}/x", len(DATA), etag)


@pytest.fixture
def source(s3_env: dict[str, str], proxy: Proxy) -> Iterator[S3Source]:
    found = open_s3(SourceSection("s3://", endpoint=proxy.endpoint))
    yield found
    found.close()


@pytest.mark.parametrize(
    ("fault", "kind", "says"),
    [
        (Fault("status", status=503, retry_after_s=3), SourceUnavailable, "503"),
        (Fault("status", status=500), SourceUnavailable, "500"),
        (Fault("cut", after_bytes=500), SourceUnavailable, "cut the response after 500 of 1000 bytes"),
        (Fault("cut", after_bytes=0), SourceUnavailable, "cut the response"),
        (Fault("reset", after_bytes=500), SourceUnavailable, "broke the connection|cut the response"),
    ],
)
def test_a_bad_answer_is_a_typed_error_and_the_next_read_works(
    source: S3Source, proxy: Proxy, version: ObjectVersion, fault: Fault, kind: type[CacheError], says: str
) -> None:
    proxy.faults.append(fault)
    with pytest.raises(kind, match=says) as caught:
        read(source, version, 10, 1000)
    assert "\n" not in str(caught.value)
    assert read(source, version, 10, 1000) == DATA[10:1010]


@pytest.mark.parametrize("fault", [Fault("status", status=412), Fault("length"), Fault("ignore-range")])
def test_a_response_that_contradicts_the_object_is_requested_again(
    source: S3Source, proxy: Proxy, version: ObjectVersion, fault: Fault
) -> None:
    proxy.faults.append(fault)
    assert read(source, version, 10, 1000) == DATA[10:1010]
    assert fault.times == 0


def test_throttling_carries_its_retry_after(source: S3Source, proxy: Proxy, version: ObjectVersion) -> None:
    proxy.faults.append(Fault("status", status=429, retry_after_s=3))
    with pytest.raises(SourceUnavailable) as caught:
        read(source, version, 0, 1000)
    assert (caught.value.throttled, caught.value.retry_after_s) == (True, 3.0)


def test_a_server_that_ignores_if_match_is_caught_by_the_etag(
    source: S3Source, proxy: Proxy, s3_server: SeaweedFS, version: ObjectVersion
) -> None:
    bucket = version.uri.split("/")[2]
    s3_server.client().put_object(Bucket=bucket, Key="x", Body=DATA[::-1])
    proxy.faults.append(Fault("ignore-if-match"))
    with pytest.raises(SourceChanged, match=version.uri):
        read(source, version, 0, 1000)


def test_a_whole_object_may_be_answered_without_a_range(
    source: S3Source, proxy: Proxy, version: ObjectVersion
) -> None:
    proxy.faults.append(Fault("ignore-range"))
    assert read(source, version, 0, len(DATA)) == DATA


def test_connections_are_kept_and_a_stale_one_is_replaced(
    source: S3Source, proxy: Proxy, version: ObjectVersion
) -> None:
    read(source, version, 0, 1000)
    proxy.hang_up()
    assert read(source, version, 5, 1000) == DATA[5:1005]


def test_an_endpoint_without_a_server_is_unavailable(s3_env: dict[str, str], version: ObjectVersion) -> None:
    found = open_s3(SourceSection("s3://", endpoint="http://127.0.0.1:1"))
    with pytest.raises(SourceUnavailable, match="check the endpoint"):
        read(found, version, 0, 1000)


def test_wrong_credentials_are_refused_by_name(
    s3_env: dict[str, str], version: ObjectVersion, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    found = open_s3()
    for call in (
        lambda: read(found, version, 0, 1000),
        lambda: found.head(version.uri),
        lambda: list(found.list(version.uri)),
    ):
        with pytest.raises(NotAllowed, match="check the credentials"):
            call()


def test_missing_credentials_are_one_clear_line(
    s3_env: dict[str, str], version: ObjectVersion, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, os.devnull)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    found = open_s3()
    for call in (lambda: read(found, version, 0, 1000), lambda: list(found.list(version.uri))):
        with pytest.raises(NotAllowed, match="no S3 credentials were found: set AWS_ACCESS_KEY_ID"):
            call()


def test_a_missing_bucket_is_not_found(source: S3Source, version: ObjectVersion) -> None:
    elsewhere = ObjectVersion("s3://not-here-at-all/x", 10, "")
    with pytest.raises(NotFound, match="not-here-at-all"):
        read(source, elsewhere)


def test_retries_give_the_right_bytes_in_the_end(
    source: S3Source, proxy: Proxy, version: ObjectVersion
) -> None:
    clock = Clock()
    patient = Resilient(source, Resilience(), clock, sleep=clock.sleep)
    proxy.faults += [Fault("status", times=2, retry_after_s=1), Fault("cut", after_bytes=70_000)]
    assert read(patient, version, 1, 500_000) == DATA[1:500_001]
    assert (patient.counters.retries, patient.counters.throttled) == (3, 2)
    assert clock.now >= 2.0


@pytest.mark.parametrize("offset", [0, 1])
def test_of_answers_that_are_all_cut_short_the_rest_is_asked_for(
    source: S3Source, proxy: Proxy, version: ObjectVersion, caplog: pytest.LogCaptureFixture, offset: int
) -> None:
    """The whole object is compared with its MD5, too, though no answer has all of it."""
    clock = Clock()
    patient = Resilient(source, Resilience(), clock, sleep=clock.sleep)
    proxy.faults.append(Fault("cut", after_bytes=70_000, times=1000))
    proxy.reset()
    size = len(DATA) - offset
    assert read(patient, version, offset, size) == DATA[offset:]
    assert clock.now == 0, "no answer was taken for an outage"
    assert patient.counters.requests == -(-size // 70_000)
    assert size <= patient.counters.bytes < 1.01 * size
    assert caplog.text.count("answers are cut short") == 1
    proxy.faults[:] = [Fault("cut", after_bytes=1000, times=1 << 30)]
    with pytest.raises(SourceUnavailable, match="cut the response after 1000 of"):
        read(patient, version, offset, size)


def test_a_stalled_read_is_hedged_and_the_winner_is_whole(
    source: S3Source, proxy: Proxy, version: ObjectVersion, monkeypatch: pytest.MonkeyPatch
) -> None:
    patient = Resilient(source, Resilience())
    for number in range(64):  # just enough samples, without a hedge among them
        read(patient, version, number, 1000)
    stall, into, first = Fault("stall", after_bytes=300), bytearray(1000), source.read_into
    reading = threading.Thread(target=patient.read_into, args=(version, 99, memoryview(into)))

    def second_is_second(*args: Any) -> None:
        # The hedge is due in a millisecond; it must not meet the stall in place of the first read.
        if threading.current_thread() is not reading:
            wait_until(lambda: not stall.times)
        first(*args)

    monkeypatch.setattr(source, "read_into", second_is_second)
    proxy.faults.append(stall)
    reading.start()
    reading.join(timeout=WAIT_S)
    assert not reading.is_alive()
    assert bytes(into) == DATA[99:1099]
    assert patient.counters.hedges == 1
    assert patient.counters.requests == 65
    patient.close()


@pytest.mark.parametrize("pays", [False, True])
def test_no_read_is_sent_again_where_the_requester_pays(
    s3_env: dict[str, str], proxy: Proxy, version: ObjectVersion, pays: bool
) -> None:
    section = SourceSection(version.uri.removesuffix("x"), endpoint=proxy.endpoint, requester_pays=pays)
    sources = Sources(SourceSettings(sections=(section,)))
    source, held, into = sources(version.uri), Fault("hold"), bytearray(1000)
    for number in range(LATENCY_SAMPLES):
        read(source, version, number, 1000)
    proxy.faults.append(held)
    reading = threading.Thread(target=source.read_into, args=(version, 99, memoryview(into)))
    reading.start()
    reading.join(10 * LEAST_LATE_S if pays else WAIT_S)
    assert reading.is_alive() == pays
    held.until.set()
    reading.join(WAIT_S)
    source.close()
    assert bytes(into) == DATA[99:1099]
    assert sources.counters().hedges == (not pays)


@pytest.mark.parametrize("key", ODD)
def test_a_key_may_hold_anything(source: S3Source, s3_server: SeaweedFS, bucket: str, key: str) -> None:
    body = key.encode() * 100
    s3_server.client().put_object(Bucket=bucket, Key=f"odd/{key}", Body=body)
    (version,) = source.list(f"s3://{bucket}/odd/")
    assert version.uri == f"s3://{bucket}/odd/{key}"
    assert source.head(version.uri) == version
    assert read(source, version, 3, len(body) - 5) == body[3:-2]
    assert read(source, version, 0, len(body)) == body


def test_an_empty_object_is_an_object_and_a_folder_marker_is_none(
    source: S3Source, proxy: Proxy, s3_server: SeaweedFS, bucket: str
) -> None:
    client = s3_server.client()
    for key in ("e/empty.bin", "e/folder/"):
        client.put_object(Bucket=bucket, Key=key, Body=b"")
    (version,) = source.list(f"s3://{bucket}/e/")
    assert (version.uri, version.size_bytes) == (f"s3://{bucket}/e/empty.bin", 0)
    proxy.reset()
    assert read(source, version, 0, 0) == b""
    assert proxy.counts.requests == 0


def test_a_name_that_does_not_resolve_is_unavailable(s3_env: dict[str, str], version: ObjectVersion) -> None:
    found = open_s3(SourceSection("s3://", endpoint="http://nowhere.invalid:80"))
    with pytest.raises(SourceUnavailable, match=r"nowhere\.invalid"):
        read(found, version, 0, 1000)


def test_a_bit_flipped_on_the_way_is_seen_where_a_whole_object_is_read(
    source: S3Source, proxy: Proxy, version: ObjectVersion
) -> None:
    assert read(source, version, 0, len(DATA)) == DATA
    proxy.faults.append(Fault("flip", after_bytes=12_345))
    patient = Resilient(source, Resilience(), clock := Clock(), sleep=clock.sleep)
    assert read(patient, version, 0, len(DATA)) == DATA
    assert patient.counters.retries == 1
