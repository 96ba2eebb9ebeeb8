"""Responses that only a fake server gives: checksums, expired credentials, huge objects, odd listings."""

from __future__ import annotations

import base64
import hashlib
import json
import socket
import sys
import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from cachesvc.config import SourceSection
from cachesvc.core.errors import NotAllowed, SourceUnavailable
from cachesvc.core.model import ObjectVersion
from cachesvc.sources.resilient import Resilience, Resilient
from cachesvc.sources.s3.http import HttpConnection, Timeouts, retry_after_s
from cachesvc.sources.s3.responses import verify
from cachesvc.sources.s3.s3 import S3Source, open_s3
from testbed import WAIT_S
from tests.support.clock import Clock
from tests.support.faults.fake_s3 import FakeS3, Object
from tests.support.faults.s3_answers import DATA, put
from tests.support.reads import read

FLIPPED = DATA[:777] + bytes([DATA[777] ^ 4]) + DATA[778:]


@contextmanager
def answered(said: bytes, timeouts: Timeouts | None = None) -> Iterator[HttpConnection]:
    """A connection to a server that sends these bytes and ends."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(said)
        theirs.shutdown(socket.SHUT_WR)
        yield HttpConnection(ours, "server:80", timeouts)


def crc32(data: bytes) -> str:
    return base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()


@pytest.mark.parametrize(
    "headers",
    [
        {"x_amz_checksum_crc32": crc32(DATA)},
        {"x_amz_checksum_sha1": base64.b64encode(hashlib.sha1(DATA).digest()).decode()},
        {"x_amz_checksum_sha256": base64.b64encode(hashlib.sha256(DATA).digest()).decode()},
    ],
)
def test_a_bit_that_flips_on_the_way_differs_from_the_stated_checksum(
    fake: FakeS3, source: S3Source, headers: dict[str, Any]
) -> None:
    version = put(fake, DATA, FLIPPED, etag="no-md5", **headers)
    with pytest.raises(SourceUnavailable, match="arrived damaged"):
        read(source, version)
    put(fake, DATA, etag="no-md5", **headers)
    assert read(source, version) == DATA


def _accept(fake: FakeS3, key: str) -> None:
    def refuse(handler: BaseHTTPRequestHandler) -> tuple[int, str] | None:
        fine = f"Credential={key}/" in handler.headers.get("Authorization", "")
        return None if fine else (400, "ExpiredToken")

    fake.refuse = refuse


@pytest.mark.parametrize("in_chunks", [False, True])
def test_keys_that_expired_are_looked_up_anew_and_used(
    fake: FakeS3, source: S3Source, monkeypatch: pytest.MonkeyPatch, in_chunks: bool
) -> None:
    version = put(fake, DATA)
    fake.in_chunks = in_chunks
    _accept(fake, "second")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "second")
    assert read(source, version) == DATA
    assert fake.requests == 2
    assert [found.uri for found in source.list("s3://bucket/")] == [version.uri]


@pytest.mark.parametrize("size", [5, 9, 10, 70_000, 200_000])
def test_a_gateway_that_sends_objects_in_chunks_is_read(fake: FakeS3, source: S3Source, size: int) -> None:
    data = bytes(range(256)) * (size // 256 + 1)
    fake.in_chunks = True
    version = put(fake, data[:size])
    for _ in range(3):
        assert read(source, version) == data[:size]
    into = bytearray(3)
    source.read_into(version, 1, memoryview(into))
    assert into == data[1:4]


@pytest.mark.parametrize("call", ["list", "head"])
def test_listings_and_heads_renew_too(
    fake: FakeS3, source: S3Source, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    version = put(fake, DATA)
    _accept(fake, "second")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "second")
    found = list(source.list("s3://bucket/")) if call == "list" else [source.head(version.uri)]
    assert found == [version]


def test_expired_keys_without_others_are_refused_by_name(fake: FakeS3, source: S3Source) -> None:
    version = put(fake, DATA)
    _accept(fake, "second")
    with pytest.raises(NotAllowed, match=r"ExpiredToken.*check the credentials"):
        read(source, version)
    assert fake.requests == 1


def test_keys_that_expired_and_are_gone_are_refused_by_name(
    fake: FakeS3, source: S3Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = put(fake, DATA)
    _accept(fake, "second")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(NotAllowed, match=r"ExpiredToken.*check the credentials"):
        read(source, version)


def test_a_request_is_signed_again_for_the_region_that_the_server_names(
    fake: FakeS3, source: S3Source
) -> None:
    def refuse(handler: BaseHTTPRequestHandler) -> tuple[int, str] | None:
        fine = "/garage/s3/" in handler.headers.get("Authorization", "")
        return None if fine else (400, "AuthorizationHeaderMalformed")

    version = put(fake, DATA)
    fake.refuse, fake.more_said = refuse, "<Region>garage</Region>"
    assert [read(source, found) for found in source.list("s3://bucket/")] == [DATA]
    asked = fake.requests
    assert read(source, version) == DATA
    assert fake.requests == asked + 1


def test_concurrent_first_reads_signed_for_another_region_are_sent_twice_each(
    fake: FakeS3, source: S3Source
) -> None:
    together = threading.Barrier(8)

    def refuse(handler: BaseHTTPRequestHandler) -> tuple[int, str] | None:
        if "/garage/s3/" in handler.headers.get("Authorization", ""):
            return None
        together.wait(WAIT_S)
        return 400, "AuthorizationHeaderMalformed"

    version = put(fake, DATA)
    fake.refuse, fake.more_said = refuse, "<Region>garage</Region>"
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda _: read(source, version), range(8))) == [DATA] * 8
    assert fake.requests == 16


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("<Key>y</Key><Size>1</Size><LastModified>0000-00-00</LastModified>", "0000-00-00"),
        (f"<Key>y</Key><Size>1</Size><LastModified>{'9' * 30}</LastModified>", "9999"),
        ("<Key>y</Key><Size>-5</Size>", "without their names or sizes"),
        (f"<Key>y</Key><Size>{2**63}</Size>", "without their names or sizes"),
        ("<Key>y</Key>", "without their names or sizes"),
        ("<Size>1</Size>", "without their names or sizes"),
    ],
)
def test_a_malformed_listing_is_the_servers_error(
    fake: FakeS3, source: S3Source, row: str, says: str
) -> None:
    put(fake, DATA)
    fake.more_rows = f"<Contents>{row}</Contents>"
    with pytest.raises(SourceUnavailable, match=says):
        list(source.list("s3://bucket/"))


@pytest.mark.parametrize(("style", "host"), [("virtual", "bucket.s3.test"), ("auto", "s3.test")])
def test_objects_are_read_at_the_host_that_lists_them(
    style: str, host: str, fake: FakeS3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hosts, find = [], socket.getaddrinfo

    def found(name: str, *arguments: Any, **options: Any) -> Any:
        return find("127.0.0.1" if name.endswith("s3.test") else name, *arguments, **options)

    def refuse(handler: BaseHTTPRequestHandler) -> None:
        hosts.append(handler.headers["Host"])

    version = replace(put(fake, DATA), uri="s3://bucket/x" if style == "auto" else "s3://bucket/folder/x")
    fake.refuse = refuse
    monkeypatch.setattr(socket, "getaddrinfo", found)
    (tmp_path / "config").write_text(f"[default]\ns3 =\n  addressing_style = {style}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    port = fake.endpoint.rpartition(":")[2]
    source = open_s3(SourceSection("s3://", endpoint=f"http://s3.test:{port}"))
    assert len(list(source.list("s3://bucket"))) == 1
    assert read(source, version) == DATA
    assert hosts == [f"{host}:{port}"] * 2
    source.close()


@pytest.mark.parametrize(
    "body",
    [
        b"zz\r\n",
        b"-5\r\nabc\r\n",
        b"fffffff\r\nabc",
        b"3\r\nabc\r\n0\r\nmore: yes\r\n\r\n",
        b"3\r\nab",
        b"5" * 99_999,
    ],
)
def test_malformed_chunks_of_an_error_keep_the_servers_error(body: bytes) -> None:
    with answered(b"HTTP/1.1 500 Oops\r\nTransfer-Encoding: chunked\r\n\r\n" + body) as connection:
        with suppress(SourceUnavailable):
            assert connection.read_error(connection.request(b"GET")) in (b"", b"abc")
        assert not connection.clean


@pytest.mark.parametrize(
    "body",
    [
        b"zz\r\n",
        b"-5\r\nabcde\r\n0\r\n\r\n",
        b"3\r\nabc\r\n0\r\n\r\n",
        b"6\r\nabcdef\r\n0\r\n\r\n",
        b"3\r\nabc\r\n3\r\ndef\r\n0\r\n\r\n",
        b"3\r\nabcd\r\n1\r\ne\r\n0\r\n\r\n",
        b"5\r\nabc",
        b"5\r\nabcde",
        b"5\r\nabcde\r\n",
        b"",
        b"5" * 99_999,
    ],
)
def test_malformed_chunks_of_an_object_are_the_servers_error(body: bytes) -> None:
    with answered(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body) as connection:
        assert connection.request(b"GET").chunked
        with pytest.raises(SourceUnavailable):
            connection.read_into(memoryview(bytearray(5)))
        assert not connection.clean


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-", "sent no whole head in"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nxx", "sent 2 of 9 bytes in"),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 9,
            "sent no whole body in",
        ),
    ],
    ids=["head", "body", "chunks"],
)
def test_an_answer_that_drips_is_given_up(answer: bytes, says: str) -> None:
    with answered(answer, Timeouts(body_s=-1.0)) as connection:

        def ask() -> None:
            connection.request(b"GET")
            connection.read_into(memoryview(bytearray(9)))

        with pytest.raises(SourceUnavailable, match=f"^server:80 {says} .*: too slow"):
            ask()


def test_a_connection_is_reused_after_a_chunked_error() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(
            b"HTTP/1.1 500 Oops\r\nTransfer-Encoding: chunked\r\n\r\n3;x=y\r\nabc\r\nA\r\ndefghijklm\r\n0\r\n\r\n"
        )
        connection = HttpConnection(ours, "server:80")
        assert connection.read_error(connection.request(b"GET")) == b"abcdefghijklm"
        assert connection.clean
        theirs.sendall(
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3;x=y\r\nabc\r\n0A\r\ndefghijklm\r\n0\r\n\r\n"
        )
        into = bytearray(13)
        connection.request(b"GET")
        connection.read_into(memoryview(into))
        assert into == b"abcdefghijklm"
        assert connection.clean


def _process(tmp_path: Path, fake: FakeS3, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Credentials from a credential process, like those of SSO and Vault, which botocore refreshes."""
    answer = tmp_path / "answer.json"
    (tmp_path / "config").write_text(
        f"[default]\ncredential_process = {sys.executable} -c 'print(open(\"{answer}\").read())'\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    return answer


def _keys(name: str, expires: str) -> str:
    return json.dumps(
        {
            "Version": 1,
            "AccessKeyId": name,
            "SecretAccessKey": "s",
            "SessionToken": "t",
            "Expiration": expires,
        }
    )


def test_a_refresh_that_fails_for_a_while_kills_no_job(
    tmp_path: Path, fake: FakeS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = _process(tmp_path, fake, monkeypatch)
    answer.write_text(_keys("first", "2099-01-01T00:00:00Z"))
    clock = Clock()
    source = open_s3(SourceSection("s3://", endpoint=fake.endpoint), clock)
    version = put(fake, DATA)
    assert read(source, version) == DATA
    _accept(fake, "second")  # the server calls the first keys expired before their stated end
    answer.write_text("a blip of the identity service")

    def sleep(seconds: float) -> None:
        clock.now += 5
        answer.write_text(_keys("second", "2099-01-01T00:00:00Z"))

    patient = Resilient(source, Resilience(), clock, sleep=sleep)
    assert read(patient, version) == DATA
    assert patient.counters.retries == 1
    source.close()


def test_a_listing_that_changes_between_pages_holds_each_key_once(fake: FakeS3, source: S3Source) -> None:
    fake.objects = {f"p/{number:06}": Object(1, "e") for number in range(2_500)}

    def change(page: int) -> None:
        if page == 1:
            fake.objects["p/000000a"] = Object(
                1, "behind"
            )  # on a page that was sent already: not in this listing
            fake.objects["p/002400a"] = Object(1, "ahead")
            del fake.objects["p/002000"]

    fake.before_page = change
    uris = [v.uri.rpartition("/")[2] for v in source.list("s3://bucket/p/")]
    assert uris == sorted(set(uris))
    assert {"002400a"} < set(uris)
    assert not {"000000a", "002000"} & set(uris)


def test_a_key_that_is_listed_twice_in_two_versions_is_looked_up(fake: FakeS3, source: S3Source) -> None:
    fake.objects["p/a"] = Object(1, "now")
    fake.more_rows = "<Contents><Key>p/a</Key><Size>1</Size><ETag>before</ETag></Contents>"
    assert [found.etag for found in source.list("s3://bucket/p/")] == ["now"]
    assert fake.asked == ["LIST", "HEAD"]


def test_a_listing_that_does_not_advance_ends(fake: FakeS3, source: S3Source) -> None:
    fake.objects = {f"p/{number:06}": Object(1, "e") for number in range(1_500)}
    fake.stuck = True
    with pytest.raises(SourceUnavailable, match="broke off its listing"):
        list(source.list("s3://bucket/p/"))
    assert fake.requests == 2


@pytest.mark.parametrize("key", ["p/a//b", "p/../b", "p/./b", "p//", "p/b/", "p/back\\slash", "p/\x01\n"])
def test_keys_that_look_like_paths_are_no_paths(fake: FakeS3, source: S3Source, key: str) -> None:
    fake.objects[key] = Object(len(DATA), hashlib.md5(DATA).hexdigest(), DATA)
    if "\x01" not in key:  # XML cannot contain this character
        assert [found.uri for found in source.list("s3://bucket/p/")] == [f"s3://bucket/{key}"]
    version = ObjectVersion(f"s3://bucket/{key}", len(DATA), hashlib.md5(DATA).hexdigest())
    assert read(source, version) == DATA


@pytest.mark.parametrize("digits", ["\xb2", "9" * 5000, "-1", "+8", "1_0"])
@pytest.mark.parametrize(
    "head",
    [
        "HTTP/1.1 200 OK\r\nContent-Length: {}",
        "HTTP/1.1 {} OK\r\nContent-Length: 8",
        'HTTP/1.1 206 OK\r\nETag: "e"\r\nContent-Length: 4\r\nContent-Range: bytes 0-3/{}',
        "HTTP/1.1 503 Slow\r\nRetry-After: {}\r\nContent-Length: 0",
    ],
)
def test_malformed_numbers_are_the_servers_error(head: str, digits: str) -> None:
    with (
        answered(head.format(digits).encode("latin-1") + b"\r\n\r\n") as connection,
        suppress(SourceUnavailable),
    ):
        answer = connection.request(b"GET / HTTP/1.1\r\n\r\n")
        if answer.status == 503:
            assert retry_after_s(answer.headers) == 0.0
        else:
            verify(ObjectVersion("s3://b/k", 8, ""), 0, 4, answer)


@pytest.mark.parametrize(
    ("said", "waits_s"),
    [
        ({"retry-after": "7"}, 7.0),
        ({"retry-after": "Wed, 21 Oct 2026 07:28:09 GMT", "date": "Wed, 21 Oct 2026 07:28:00 GMT"}, 9.0),
        ({"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT", "date": "Wed, 21 Oct 2026 07:28:09 GMT"}, 0.0),
        ({"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"}, 0.0),
        ({"retry-after": "Wed, 21 Oct 2026 07:28:00 -0000", "date": "Wed, 21 Oct 2026 07:28:00 GMT"}, 0.0),
        ({"retry-after": "soon"}, 0.0),
        ({"retry-after": f"Wed, 21 Oct {'9' * 30} 07:28:00 GMT"}, 0.0),
        ({"retry-after": f"Wed, 21 Oct 2026 07:28:00 +{'9' * 30}"}, 0.0),
        ({}, 0.0),
    ],
)
def test_retry_after_is_seconds_or_a_date(said: dict[str, str], waits_s: float) -> None:
    assert retry_after_s(said) == waits_s
